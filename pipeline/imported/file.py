"""A user's `.onnx` file: what it takes and gives, whether it can be served, and its weights in one piece."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import onnx
import onnx.inliner
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, numpy_helper
from onnx.external_data_helper import ExternalDataInfo, load_external_data_for_model, uses_external_data

from pipeline.artifact import canonical, sha256_file
from pipeline.errors import PipelineError

Layout = Literal["nchw", "nhwc"]

MAX_BYTES = 2**31 - 2**20  # protobuf's limit for one file, less what wrapping adds
FLOATS: dict[int, str] = {
    TensorProto.FLOAT16: "float16",
    TensorProto.FLOAT: "float32",
    TensorProto.DOUBLE: "float64",
}
PIXELS = FLOATS | {int(TensorProto.UINT8): "uint8"}
RANDOM = {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli"}
QUANTIZED = {"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "ConvInteger", "MatMulInteger"} | {
    "MatMulIntegerToFloat",
    "DynamicQuantizeMatMul",
    "MatMulNBits",
    "QAttention",
    "QGemm",
}


@dataclass(frozen=True)
class GivenGraph:
    """What the user's file says about itself. None: any size."""

    path: Path
    input: str
    output: str
    number: str  # numpy's name of the input's numbers
    layout: Layout
    batch: int | None
    channels: int | None
    height: int | None
    width: int | None

    @property
    def image_size(self) -> dict[str, int]:
        """Return the fields of [data] that the graph decides."""
        sizes = {"height": self.height, "width": self.width, "channels": self.channels}
        return {name: value for name, value in sizes.items() if value is not None}


def inspect(path: Path, *, layout: str) -> GivenGraph:
    """Describe the graph; its weights are not read.

    Raises `PipelineError`, on one line, for a file that is no image classifier in floating point and inference mode.
    """
    model = _read(path)
    _refuse_what_cannot_be_served(path, model)
    taken, given = _only(path, "input", _inputs(model)), _only(path, "output", list(model.graph.output))
    number = PIXELS.get(taken.type.tensor_type.elem_type)
    if number is None:
        known = ", ".join(PIXELS.values())
        raise PipelineError(f"{path.name}: its input {taken.name} is no image: {_type(taken)}, not one of {known}")
    dims = _dims(taken)
    if len(dims) != 4:
        raise PipelineError(
            f"{path.name}: its input {taken.name} is no batch of images: {_shape(dims)}, not 4 dimensions"
        )
    if given.type.tensor_type.elem_type not in FLOATS:
        raise PipelineError(f"{path.name}: its output {given.name} holds no logits or probabilities: {_type(given)}")
    found = _layout(path, taken.name, dims, layout)
    channels, height, width = (dims[1], *dims[2:]) if found == "nchw" else (dims[3], *dims[1:3])
    if channels not in (1, 3, None):
        raise PipelineError(
            f"{path.name}: its input {taken.name} {_shape(dims)} has {channels} channels as {found}; images have 1 or 3"
        )
    return GivenGraph(path, taken.name, given.name, number, found, dims[0], channels, height, width)


def read_whole(path: Path) -> ModelProto:
    """Return the graph with all weights inside, and without functions of its own. Nothing is written beside it."""
    size = sum(file.stat().st_size for file in files_of(path))
    if size > MAX_BYTES:
        raise PipelineError(f"{path.name} has {size:,} bytes of weights; one ONNX file holds at most {MAX_BYTES:,}")
    model = _read(path)
    load_external_data_for_model(model, str(path.parent))
    return model


def files_of(path: Path) -> list[Path]:
    """Return the file and those in which it keeps weights."""
    tensors = [tensor for tensor in _tensors(_read(path)) if uses_external_data(tensor)]
    return [path, *(path.parent / name for name in sorted({ExternalDataInfo(tensor).location for tensor in tensors}))]


def digest_of(path: Path) -> str:
    """Return a sha256 over the file and those in which it keeps weights."""
    files = [[str(file.relative_to(path.parent)), sha256_file(file)] for file in files_of(path)[1:]]
    return hashlib.sha256(canonical([sha256_file(path), files]).encode()).hexdigest()


def opset_of(model: ModelProto) -> int:
    """Return the version of the standard operators."""
    return next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 1)


def one_line(error: Exception) -> str:
    """Return what a library said, short and on one line."""
    return " ".join(str(error).split())[:300]


def constants_of(model: ModelProto) -> dict[str, TensorProto]:
    """Return every tensor that the graph and its inner graphs hold by name."""
    found = {tensor.name: tensor for graph in _graphs(model.graph) for tensor in graph.initializer}
    for node in nodes_of(model):
        if node.op_type == "Constant" and node.attribute and node.attribute[0].HasField("t"):
            found[node.output[0]] = node.attribute[0].t
    return found


def nodes_of(model: ModelProto) -> Iterator[NodeProto]:
    """Yield the nodes of the graph and of those inside it."""
    for graph in _graphs(model.graph):
        yield from graph.node


def _read(path: Path) -> ModelProto:
    if not path.is_file():
        raise PipelineError(f"there is no ONNX file {path}; pass --onnx FILE")
    try:
        onnx.checker.check_model(str(path))
    except onnx.checker.ValidationError as error:
        raise PipelineError(f"{path.name} is no valid ONNX file: {one_line(error)}") from error
    model = onnx.load(path, format="protobuf", load_external_data=False)
    return onnx.inliner.inline_local_functions(model) if model.functions else model


def _refuse_what_cannot_be_served(path: Path, model: ModelProto) -> None:
    constants, opset = constants_of(model), opset_of(model)
    for node in nodes_of(model):
        shown = f"{path.name}: node {node.name or node.output[0]} ({node.op_type})"
        if node.op_type in QUANTIZED or node.op_type.startswith("QLinear"):
            raise PipelineError(f"{shown} is quantized already; name the float model that it was made from")
        if _trains(node, constants, opset):
            raise PipelineError(f"{shown} is in training mode: answers would change; export the model in eval mode")
        if node.op_type in RANDOM:
            raise PipelineError(f"{shown} draws at random: the same image would get other answers")


def _trains(node: NodeProto, constants: dict[str, TensorProto], opset: int) -> bool:
    """Tell whether a node computes as in training; a mode that is no constant counts as that, too."""
    attributes = {attribute.name: attribute.i for attribute in node.attribute}
    if node.op_type == "BatchNormalization":
        return attributes.get("training_mode", 0) == 1 or (opset < 14 and len([o for o in node.output if o]) > 1)
    if node.op_type != "Dropout" or len(node.input) < 3 or not node.input[2]:
        return False
    mode = constants.get(node.input[2])
    return mode is None or bool(numpy_helper.to_array(mode))


def _inputs(model: ModelProto) -> list[ValueInfoProto]:
    """Return what a caller has to give: files of old versions list the weights among the inputs."""
    weights = {tensor.name for tensor in model.graph.initializer}
    return [value for value in model.graph.input if value.name not in weights]


def _only(path: Path, kind: str, values: list[ValueInfoProto]) -> ValueInfoProto:
    if len(values) != 1:
        names = ", ".join(value.name for value in values) or "none"
        raise PipelineError(f"{path.name} has {len(values)} {kind}s ({names}); a classifier has one {kind}")
    return values[0]


def _dims(value: ValueInfoProto) -> list[int | None]:
    return [dim.dim_value if dim.dim_value > 0 else None for dim in value.type.tensor_type.shape.dim]


def _layout(path: Path, name: str, dims: list[int | None], asked: str) -> Layout:
    """Return the layout that is asked for, or the only one under which the shape has 1 or 3 channels."""
    if asked != "auto":
        return cast(Layout, asked)
    first, last = dims[1] in (1, 3), dims[3] in (1, 3)
    if first == last:
        raise PipelineError(
            f"{path.name}: its input {name} {_shape(dims)} may have its channels first or last; "
            "pass --onnx.layout nchw or --onnx.layout nhwc"
        )
    return "nchw" if first else "nhwc"


def _shape(dims: list[int | None]) -> str:
    return f"[{', '.join('?' if dim is None else str(dim) for dim in dims)}]"


def _type(value: ValueInfoProto) -> str:
    if not value.type.HasField("tensor_type"):
        return "no tensor"
    return str(TensorProto.DataType.Name(value.type.tensor_type.elem_type)).lower()


def _graphs(graph: GraphProto) -> Iterator[GraphProto]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            inner = [attribute.g] if attribute.type == AttributeProto.GRAPH else attribute.graphs
            for each in inner:
                yield from _graphs(each)


def _tensors(model: ModelProto) -> Iterator[TensorProto]:
    for graph in _graphs(model.graph):
        yield from graph.initializer
        for node in graph.node:
            for attribute in node.attribute:
                yield from [attribute.t] if attribute.type == AttributeProto.TENSOR else attribute.tensors
