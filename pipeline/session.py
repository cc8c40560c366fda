"""ONNX Runtime sessions as the worker opens them: what is measured and compared here is what will be served."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray

import serving.worker.model
from pipeline.errors import PipelineError
from serving.worker.contents import PackageError


def open_session(graph: Path, *, provider: str = "cpu") -> onnxruntime.InferenceSession:
    """Open a graph with one thread that does not spin, on the CPU or on the first visible GPU."""
    return serving.worker.model.open_session(graph, provider=provider)


def require_provider(provider: str) -> None:
    """Raise `PipelineError` unless `provider` (cpu, cuda or tensorrt) can run a graph on this machine."""
    value = onnx.helper.make_tensor_value_info
    node = onnx.helper.make_node("Add", ["x", "x"], ["y"])
    kind = onnx.TensorProto.FLOAT
    graph = onnx.helper.make_graph([node], "tiny", [value("x", kind, [1])], [value("y", kind, [1])])
    opset = onnx.helper.make_opsetid("", 20)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "tiny.onnx"
        onnx.save(onnx.helper.make_model(graph, opset_imports=[opset], ir_version=10), path)
        try:
            open_session(path, provider=provider).run(["y"], {"x": np.ones(1, np.float32)})
        except PackageError as error:
            raise PipelineError(
                f"export.provider = {provider!r} does not load here: {error}; install its libraries and driver or pass "
                "--export.provider cpu"
            ) from error


def probabilities(session: onnxruntime.InferenceSession, images_BHWC: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return float32 [B, K] for uint8 [B, H, W, C]."""
    return cast(NDArray[np.float32], session.run(["probabilities"], {"images": images_BHWC})[0])
