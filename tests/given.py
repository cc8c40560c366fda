"""Small ONNX classifiers as users have them, and folders of images whose right answers are known: the colour."""

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
from onnx import numpy_helper
from PIL import Image

LABELS = ("blue", "green", "red")  # sorted, as the folders are: the graph's outputs are in this order
SIZE = 16
MODEL = """
<ir_version: 8, opset_import: ["": {opset}]>
given ({number}[{shape}] x) => ({number}[{batch}, 3] y)
<float[3, 3] w = {{0, 0, 20, 0, 20, 0, 20, 0, 0}}, int64[2] flat = {{{first}, 3}}> {{
  {body}
}}
"""
BODY = "m = GlobalAveragePool(x) f = Reshape(m, flat) y = MatMul(f, w)"
CONV = "c = Conv<kernel_shape = [1, 1]>(x, kernel) m = GlobalAveragePool(c) f = Reshape(m, flat) y = MatMul(f, w)"
SOFTMAX = "m = GlobalAveragePool(x) f = Reshape(m, flat) z = MatMul(f, w) y = Softmax<axis = 1>(z)"


def graph_text(
    body: str = BODY,
    *,
    shape: str | None = None,
    number: str = "float",
    batch: str = "N",
    first: int = -1,
    opset: int = 17,
) -> str:
    """Return a classifier of the mean colour, [N, 3, 16, 16] -> logits [N, 3], in ONNX's own text form."""
    shape = shape or f"{batch}, 3, {SIZE}, {SIZE}"
    return MODEL.format(body=body, shape=shape, number=number, batch=batch, first=first, opset=opset)


def write_graph(folder: Path, text: str | None = None, *, name: str = "given.onnx") -> Path:
    """Write the graph of `text` (default: `graph_text()`) and return its path."""
    path = folder / name
    model = onnx.parser.parse_model(text or graph_text())
    for tensor in model.graph.initializer:  # as exporters write them
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor), tensor.name))
    onnx.save(model, path)
    return path


def conv_text() -> str:
    """Return the classifier with a convolution before it, which keeps each colour as it is."""
    return graph_text(CONV).replace(
        "<float[3, 3] w", "<float[3, 3, 1, 1] kernel = {1, 0, 0, 0, 1, 0, 0, 0, 1}, float[3, 3] w"
    )


def write_images(folder: Path, *, each: int = 10, size: int = SIZE) -> Path:
    """Write `folder`/train/COLOUR/*.png, noise in which one colour is the brightest, and return `folder`."""
    draw = np.random.default_rng(0).integers
    for label, channel in zip(LABELS, (2, 1, 0), strict=True):
        (folder / "train" / label).mkdir(parents=True)
        for number in range(each):
            pixels = draw(0, 120, (size, size, 3), np.uint8)
            pixels[..., channel] += 100
            Image.fromarray(pixels).save(folder / "train" / label / f"{number}.png")
    return folder
