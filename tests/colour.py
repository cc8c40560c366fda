"""A classifier whose right answers are known without training: the colours of the top and of the bottom half.

Shape legend: B batch, H height, W width, C channels, K classes.
"""

import hashlib
import io
import zipfile
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from pipeline.package import build_archive
from serving.worker.preprocess import Preprocessing, decode

LABELS = ["red", "green", "blue", "red over blue", "blue over red", "white", "black"]
SPEC = Preprocessing(height=32, width=32, channels=3, resize=32)
COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255), "white": (255, 255, 255), "black": (0, 0, 0)}
TOLERANCE = 1e-3
SHARPNESS = 20.0  # a pure colour's own class gets more than 0.999

# Top and bottom half of the ideal image of each class, as R, G, B in [0, 1].
_IDEAL: NDArray[np.float32] = np.array(
    [
        [1, 0, 0, 1, 0, 0],
        [0, 1, 0, 0, 1, 0],
        [0, 0, 1, 0, 0, 1],
        [1, 0, 0, 0, 0, 1],
        [0, 0, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 1],
        [0, 0, 0, 0, 0, 0],
    ],
    np.float32,
)


def colour_onnx(labels: int = len(LABELS), *, scale: float = SHARPNESS) -> bytes:
    """Return a graph from `images` uint8 [B, H, W, 3] to `probabilities` float32 [B, K] for the first K classes.

    Logit k = scale (m . w_k - |w_k|^2 / 2), with m the mean colours: the nearest ideal image wins.
    """
    ideal = _IDEAL[:labels]
    weight = (scale * ideal.T).astype(np.float32)
    offset = (-scale * (ideal**2).sum(axis=1) / 2).astype(np.float32)
    half = SPEC.height // 2
    constants = {
        "weight": weight,
        "offset": offset,
        "full": np.array(255, np.float32),
        "zero": np.array([0], np.int64),
        "middle": np.array([half], np.int64),
        "end": np.array([2 * half], np.int64),
        "rows": np.array([1], np.int64),
        "area": np.array([1, 2], np.int64),
    }
    nodes = [
        helper.make_node("Cast", ["images"], ["float"], to=TensorProto.FLOAT),
        helper.make_node("Div", ["float", "full"], ["unit"]),
        helper.make_node("Slice", ["unit", "zero", "middle", "rows"], ["top"]),
        helper.make_node("Slice", ["unit", "middle", "end", "rows"], ["bottom"]),
        helper.make_node("ReduceMean", ["top", "area"], ["top_mean"], keepdims=0),
        helper.make_node("ReduceMean", ["bottom", "area"], ["bottom_mean"], keepdims=0),
        helper.make_node("Concat", ["top_mean", "bottom_mean"], ["means"], axis=1),
        helper.make_node("Gemm", ["means", "weight", "offset"], ["logits"]),
        helper.make_node("Softmax", ["logits"], ["probabilities"], axis=-1),
    ]
    graph = helper.make_graph(
        nodes,
        "colour",
        [helper.make_tensor_value_info("images", TensorProto.UINT8, ["batch", SPEC.height, SPEC.width, 3])],
        [helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["batch", labels])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    data: bytes = model.SerializeToString(deterministic=True)
    return data


def square(colour: str | tuple[int, ...], *, size: int = 48, mode: str = "RGB") -> Image.Image:
    """Return a square of one colour, by name or by value."""
    return Image.new(mode, (size, size), COLOURS[colour] if isinstance(colour, str) else colour)


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    """Return the bytes of an image file."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def png(colour: str) -> bytes:
    """Return a PNG of one colour."""
    return encoded(square(colour))


def golden_of(graph: bytes, *colours: str) -> list[tuple[bytes, list[float]]]:
    """Return PNGs with the probabilities that `graph` gives for them."""
    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    images = [png(colour) for colour in colours]
    return [
        (image, session.run(["probabilities"], {"images": decode(image, SPEC)[None]})[0][0].tolist())
        for image in images
    ]


def colour_archive(
    folder: Path, *, name: str = "colour", version: str = "1.0", labels: int = len(LABELS), scale: float = SHARPNESS
) -> Path:
    """Build a ready archive of the colour classifier in `folder`."""
    graph = colour_onnx(labels, scale=scale)
    path = folder / f"{hashlib.sha256(graph).hexdigest()[:8]}.onnx"
    path.write_bytes(graph)
    try:
        return build_archive(
            folder,
            name=name,
            version=version,
            onnx=path,
            labels=LABELS[:labels],
            preprocessing=SPEC,
            golden=golden_of(graph, "red", "green", "blue"),
            tolerance=TOLERANCE,
            provenance={"candidate": "hand-made"},
        )
    finally:
        path.unlink()


def unpack(archive: Path) -> Path:
    """Unpack an archive beside itself, as TorchServe does, and return the folder."""
    folder = archive.with_suffix(".unpacked")
    with zipfile.ZipFile(archive) as opened:
        opened.extractall(folder)
    return folder
