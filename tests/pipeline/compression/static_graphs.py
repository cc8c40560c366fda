"""A small residual network as an ONNX file, for tests of static int8: pixels in, probabilities out, random weights."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime
from numpy.typing import NDArray
from onnx import numpy_helper

SIZE = 12
BODY = """
  t = Transpose<perm = [0, 3, 1, 2]>(images)
  f = Cast<to = 1>(t)
  d = Div(f, depth)
  s = Sub(d, mean)
  x = Div(s, std)
  a = Conv<pads = [1, 1, 1, 1]>(x, w1, b1)
  r = Relu(a)
  c = Conv<pads = [1, 1, 1, 1]>(r, w2, b2)
  e = Add(c, r)
  q = Relu(e)
  m = ReduceMean<axes = [2, 3]>(q)
  v = Reshape(m, flat)
  z = Gemm<transB = 1>(v, w3, b3)
  probabilities = Softmax<axis = 1>(z)
"""
TEXT = """
<ir_version: 8, opset_import: ["": {opset}]>
g (uint8[{batch}, 12, 12, 3] images) => (float[{batch}, 4] probabilities) {{ {body} }}
"""


def weights() -> dict[str, NDArray[Any]]:
    """Return the constants of `BODY`."""
    draw = np.random.default_rng(0).standard_normal
    return {
        "depth": np.array(255, np.float32),
        "mean": np.array([0.5, 0.4, 0.3], np.float32).reshape(1, 3, 1, 1),
        "std": np.array([0.2, 0.3, 0.4], np.float32).reshape(1, 3, 1, 1),
        "w1": (draw((8, 3, 3, 3)) / 5).astype(np.float32),
        "b1": draw(8).astype(np.float32),
        "w2": (draw((8, 8, 3, 3)) / 8).astype(np.float32),
        "b2": draw(8).astype(np.float32),
        "flat": np.array([-1, 8]),
        "w3": (draw((4, 8)) * 3).astype(np.float32),
        "b3": np.zeros(4, np.float32),
    }


def write_network(
    path: Path,
    *,
    changed: Mapping[str, NDArray[Any]] | None = None,
    body: str = BODY,
    opset: int = 13,
    batch: str = "N",
) -> Path:
    """Write the network with some constants `changed`, and return its path."""
    model = onnx.parser.parse_model(TEXT.format(body=body, opset=opset, batch=batch))
    constants = weights() | dict(changed or {})
    used = {name for node in model.graph.node for name in node.input}
    tensors = [numpy_helper.from_array(np.asarray(v), name) for name, v in constants.items() if name in used]
    model.graph.initializer.extend(tensors)
    onnx.save(model, path)
    return path


def pixels(count: int, *, seed: int = 0) -> NDArray[np.uint8]:
    """Return uint8 [count, 12, 12, 3]: noise of a random colour, so that the answers differ."""
    generator = np.random.default_rng(seed)
    colours = generator.integers(0, 200, (count, 1, 1, 3))
    return (colours + generator.integers(0, 56, (count, SIZE, SIZE, 3))).astype(np.uint8)


def answers(path: Path, images: NDArray[Any]) -> NDArray[np.float32]:
    """Return what ONNX Runtime answers, image by image."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    taken = session.get_inputs()[0].name
    return np.concatenate([session.run(None, {taken: image[None]})[0] for image in images])


class Validation:
    """Images that come in batches."""

    def __init__(self, images: NDArray[Any]) -> None:
        self.images = images

    def __call__(self, size: int) -> Iterator[NDArray[Any]]:
        for start in range(0, len(self.images), size):
            yield self.images[start : start + size]
