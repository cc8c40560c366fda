"""ONNX Runtime sessions as the worker opens them: what is measured and compared here is what will be served."""

from pathlib import Path
from typing import cast

import numpy as np
import onnxruntime
from numpy.typing import NDArray

import serving.worker.model


def open_session(graph: Path) -> onnxruntime.InferenceSession:
    """Open a graph on the CPU, with one thread and without spinning."""
    return serving.worker.model.open_session(graph, gpu_id=None)


def probabilities(session: onnxruntime.InferenceSession, images_BHWC: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return float32 [B, K] for uint8 [B, H, W, C]."""
    return cast(NDArray[np.float32], session.run(["probabilities"], {"images": images_BHWC})[0])
