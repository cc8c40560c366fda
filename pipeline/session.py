"""ONNX Runtime sessions as the worker opens them: what is measured and compared here is what will be served."""

from pathlib import Path
from typing import cast

import numpy as np
import onnxruntime
from numpy.typing import NDArray


def open_session(model: Path | bytes) -> onnxruntime.InferenceSession:
    """Open a graph with one thread and without spinning."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    source = model if isinstance(model, bytes) else str(model)
    return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def probabilities(session: onnxruntime.InferenceSession, images_BHWC: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return float32 [B, K] for uint8 [B, H, W, C]."""
    return cast(NDArray[np.float32], session.run(["probabilities"], {"images": images_BHWC})[0])
