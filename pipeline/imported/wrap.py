"""A given graph brought into our contract: uint8 `images` [B, H, W, C] in, float32 `probabilities` [B, K] out.

Every name of the user's gets a prefix, so that ours are free.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx.compose
import onnx.version_converter
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from pipeline.errors import PipelineError
from pipeline.imported.file import FLOATS, GivenGraph, constants_of, nodes_of, one_line, opset_of
from pipeline.imported.reference import Normalisation

MIN_OPSET = 13  # QuantizeLinear with a scale for each channel
MIN_IR = 8  # weights need not be listed among the inputs
PREFIX = "given/"


def wrap(
    model: ModelProto,
    given: GivenGraph,
    *,
    normalisation: Normalisation,
    softmax: bool,
    image_HWC: tuple[int, int, int],
    num_classes: int,
    metadata: Mapping[str, str],
) -> ModelProto:
    """Return `model`, its batch free, with layout, normalisation and softmax inside; `model` itself is left as it is.

    Raises `PipelineError` for operators so old that they cannot be upgraded.
    """
    wrapped = onnx.compose.add_prefix(_upgraded(model, name=given.path.name), PREFIX)
    if given.batch is not None:
        _free_batch(wrapped, batch=given.batch)
    graph = wrapped.graph
    numbers = graph.output[0].type.tensor_type.elem_type
    weights = _normalisation_weights(normalisation, given)
    nodes = [
        *_before(given, weights),
        *graph.node,
        *_after(PREFIX + given.output, float32=FLOATS[numbers] == "float32", softmax=softmax),
    ]
    del graph.node[:], graph.input[:], graph.output[:], graph.value_info[:]
    graph.node.extend(nodes)
    graph.initializer.extend(weights)
    graph.input.append(helper.make_tensor_value_info("images", TensorProto.UINT8, ["batch", *image_HWC]))
    graph.output.append(helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["batch", num_classes]))
    wrapped.ir_version = max(wrapped.ir_version, MIN_IR)
    theirs = {entry.key: entry.value for entry in wrapped.metadata_props}
    helper.set_model_props(wrapped, theirs | dict(metadata) | {"quartet": "1"})
    onnx.checker.check_model(wrapped)
    return wrapped


def _upgraded(model: ModelProto, *, name: str) -> ModelProto:
    if (opset := opset_of(model)) >= MIN_OPSET:
        return model
    try:
        return onnx.version_converter.convert_version(model, MIN_OPSET)
    except (RuntimeError, onnx.version_converter.ConvertError) as error:
        raise PipelineError(
            f"{name} has opset {opset} and cannot be upgraded to {MIN_OPSET} ({one_line(error)}); export it again"
        ) from error


def _free_batch(model: ModelProto, *, batch: int) -> None:
    """Let a graph that was exported for one batch size take any, where only shapes of Reshape nodes hold it fast.

    `[batch, ...]` becomes `[0, ...]`, which copies the first dimension of what is reshaped.
    """
    graph, first, constants = model.graph, _first_dims(model), constants_of(model)
    for number, node in enumerate(graph.node):
        if node.op_type != "Reshape" or node.input[1] not in constants or first.get(node.input[0]) != batch:
            continue
        shape = numpy_helper.to_array(constants[node.input[1]]).copy()
        if not len(shape) or shape[0] != batch or 0 in shape:
            continue
        shape[0] = 0
        node.input[1] = f"shape-{number}"
        del node.attribute[:]  # allowzero, which the newer exporter sets: a 0 would be no copy
        graph.initializer.append(numpy_helper.from_array(shape, node.input[1]))
    # Shapes that nothing uses any more go, because ONNX Runtime warns of each.
    used = {name for node in nodes_of(model) for name in node.input} | {graph.output[0].name}
    tensors = [tensor for tensor in graph.initializer if tensor.name in used]
    nodes = [node for node in graph.node if node.op_type != "Constant" or node.output[0] in used]
    del graph.initializer[:], graph.node[:]
    graph.initializer.extend(tensors)
    graph.node.extend(nodes)


def _first_dims(model: ModelProto) -> dict[str, int]:
    """Return the first dimension of every tensor whose shape is known."""
    graph = onnx.shape_inference.infer_shapes(model).graph
    values = [*graph.input, *graph.value_info]
    shapes = {value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in values}
    return {name: dims[0] for name, dims in shapes.items() if dims}


def _normalisation_weights(normalisation: Normalisation, given: GivenGraph) -> list[TensorProto]:
    """Return factor and offset by which pixels become what the graph takes; none for one that takes pixels."""
    if given.number == "uint8":
        return []
    std, mean = np.array(normalisation.std), np.array(normalisation.mean)
    shape = (-1, 1, 1) if given.layout == "nchw" else (-1,)
    pairs = {"normalisation/factor": 1 / (normalisation.scale * std), "normalisation/offset": -mean / std}
    return [numpy_helper.from_array(value.astype(np.float32).reshape(shape), name) for name, value in pairs.items()]


def _before(given: GivenGraph, weights: list[TensorProto]) -> list[NodeProto]:
    """Return the nodes from `images` to the graph's input: transposed as bytes, which are the least to move."""
    steps: list[tuple[str, list[str], dict[str, Any]]] = []
    if given.layout == "nchw":
        steps.append(("Transpose", [], {"perm": [0, 3, 1, 2]}))
    if weights:
        steps.append(("Cast", [], {"to": TensorProto.FLOAT}))
        steps += [(kind, [weight.name], {}) for kind, weight in zip(("Mul", "Add"), weights, strict=True)]
    if given.number not in ("uint8", "float32"):
        numbers = {name: number for number, name in FLOATS.items()}
        steps.append(("Cast", [], {"to": numbers[given.number]}))
    return _in_a_row(steps, "images", PREFIX + given.input, name="normalisation")


def _after(output: str, *, float32: bool, softmax: bool) -> list[NodeProto]:
    """Return the nodes from the graph's output to `probabilities`."""
    steps: list[tuple[str, list[str], dict[str, Any]]] = []
    if not float32:
        steps.append(("Cast", [], {"to": TensorProto.FLOAT}))
    if softmax:
        steps.append(("Softmax", [], {"axis": -1}))
    return _in_a_row(steps, output, "probabilities", name="answer")


def _in_a_row(
    steps: list[tuple[str, list[str], dict[str, Any]]], first: str, last: str, *, name: str
) -> list[NodeProto]:
    """Return nodes that lead from tensor `first` to tensor `last`, each step (operator, more inputs, attributes)."""
    nodes: list[NodeProto] = []
    steps = steps or [("Identity", [], {})]
    for number, (kind, more, attributes) in enumerate(steps, 1):
        target = last if number == len(steps) else f"{name}/{number}"
        nodes.append(helper.make_node(kind, [first, *more], [target], name=f"{name}/{kind}-{number}", **attributes))
        first = target
    return nodes
