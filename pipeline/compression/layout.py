"""Rewrites of a float graph that change no answer and let int8 kernels run: pooling, and the normalisation's layout."""

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

ELEMENTWISE = ("Div", "Mul", "Sub", "Add")


def pool_globally(graph: onnx.GraphProto) -> None:
    """Replace a mean over height and width, which has no int8 kernel, by the pooling that has one."""
    constants = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type != "ReduceMean":
            continue
        options = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        axes = options.get("axes")
        if len(node.input) > 1 and node.input[1] in constants:
            axes = numpy_helper.to_array(constants[node.input[1]]).tolist()
        if options.get("keepdims", 1) and axes and set(axes) in ({-1, -2}, {2, 3}):
            node.op_type = "GlobalAveragePool"
            del node.input[1:], node.attribute[:]


def unroll_normalisation(graph: onnx.GraphProto) -> None:
    """Normalise rows of W * C values before the channels move to the front, not planes after.

    Int8 convolutions keep channels last, so ONNX Runtime moves the transposition behind the normalisation, where a
    constant of three values is broadcast over three values at a time: slower than the largest layers. Constants
    repeated over a row give the same answers, bit for bit.
    """
    chain = _normalisation(graph)
    if not chain:
        return
    shape = graph.input[0].type.tensor_type.shape.dim
    height, width, channels = (dim.dim_value for dim in shape[1:])
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    transpose, cast, *steps = chain
    added: list[tuple[str, NDArray[np.generic]]] = [
        ("rows_shape", np.array([0, height, width * channels], np.int64)),
        ("pixels_shape", np.array([0, height, width, channels], np.int64)),
    ]
    cast.input[0] = "rows"
    for number, step in enumerate(steps):
        values = constants[step.input[1]]
        if values.ndim:  # of one grey channel, too: four dimensions against three would put the images in the second
            added.append((f"row_constant_{number}", np.tile(values.ravel(), width)))
            step.input[1] = added[-1][0]
    end = steps[-1].output[0]
    steps[-1].output[0] = "normalised_rows"
    position = list(graph.node).index(steps[-1]) + 1
    rows = helper.make_node("Reshape", [transpose.input[0], "rows_shape"], ["rows"], "rows")
    pixels = helper.make_node("Reshape", ["normalised_rows", "pixels_shape"], ["normalised"], "normalised")
    planes = helper.make_node("Transpose", ["normalised"], [end], "planes", perm=[0, 3, 1, 2])
    graph.node.insert(position, planes)
    graph.node.insert(position, pixels)
    graph.node.insert(list(graph.node).index(cast), rows)
    graph.node.remove(transpose)
    graph.initializer.extend(numpy_helper.from_array(values, name) for name, values in added)
    _drop_stale(graph)


def _normalisation(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Return the transposition, the cast and the arithmetic from the pixels on; empty where the graph has others."""
    if len(graph.input) != 1 or len(graph.input[0].type.tensor_type.shape.dim) != 4:
        return []
    channels = graph.input[0].type.tensor_type.shape.dim[3].dim_value
    sizes = {tensor.name: list(tensor.dims) for tensor in graph.initializer}
    planes = ([1, channels, 1, 1], [channels, 1, 1])
    chain: list[onnx.NodeProto] = []
    tensor = graph.input[0].name
    while len(readers := [node for node in graph.node if tensor in node.input]) == 1:
        node = readers[0]
        if not chain:
            fits = node.op_type == "Transpose" and list(node.attribute[0].ints) == [0, 3, 1, 2]
        elif len(chain) == 1:
            fits = node.op_type == "Cast" and node.attribute[0].i == TensorProto.FLOAT
        else:
            dims = sizes.get(node.input[1]) if node.op_type in ELEMENTWISE else None
            fits = dims is not None and (dims == [] or dims in planes)
        if not fits:
            break
        chain.append(node)
        tensor = node.output[0]
    known = all(dim.dim_value for dim in graph.input[0].type.tensor_type.shape.dim[1:])
    return chain if len(chain) > 2 and known else []


def _drop_stale(graph: onnx.GraphProto) -> None:
    """Forget the shapes of tensors, which are inferred anew."""
    del graph.value_info[:]
