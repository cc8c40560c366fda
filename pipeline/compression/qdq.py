"""A float ONNX graph made ready for int8, and its copy with quantize/dequantize pairs around the layers that gain."""

import tempfile
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto
from onnx.shape_inference import infer_shapes
from onnx.version_converter import convert_version

from pipeline.compression.layout import pool_globally, unroll_normalisation
from pipeline.compression.ranges import Range
from pipeline.errors import PipelineError

LAYERS = ("Conv", "Gemm")  # have weights
# Compute in int8 when all that they take is int8 already; alone each would cost a conversion and gain nothing.
SEVERAL = ("Add", "Concat", "Mul")  # of several tensors, all of which must be int8
POINTWISE = ("Clip", "LeakyRelu", "Relu", "Sigmoid")
FOLLOWERS = (*SEVERAL, *POINTWISE, "AveragePool", "Flatten", "GlobalAveragePool", "MaxPool", "Reshape")
ACTIVATIONS = ("Relu", "Clip")  # a range that starts at zero does their work
QUANTIZED = ("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "ConvInteger", "MatMulInteger")
KNOWN_DOMAINS = ("", "ai.onnx", "ai.onnx.ml", "com.microsoft")
OLDEST_OPSET = 13  # the first with a scale for each channel


@dataclass(frozen=True)
class Graph:
    """A graph that can be quantized. Every node has a name, every tensor that matters a known type."""

    model: onnx.ModelProto
    batch: int | None  # the only batch size that it takes, or None for any

    def weights(self) -> set[str]:
        """Return the names of the constants."""
        return {tensor.name for tensor in self.model.graph.initializer}

    def floats(self) -> set[str]:
        """Return the names of the float32 tensors that are computed."""
        infos = [*self.model.graph.value_info, *self.model.graph.output, *self.model.graph.input]
        return {info.name for info in infos if info.type.tensor_type.elem_type == TensorProto.FLOAT} - self.weights()


def prepare(source: Path) -> Graph:
    """Read a graph, fold what is constant, and bring it into the shape in which int8 is fast. The file stays as it is.

    Raises `PipelineError`, "cannot quantise: node X because Y", for a graph that is int8 or float16 already, that
    has a node ONNX Runtime does not know, or that has no convolution.
    """
    model = _load(source)
    _refuse(model)
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in weights]  # old files list constants, too
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    opset = next(o.version for o in model.opset_import if o.domain in ("", "ai.onnx"))
    if opset < OLDEST_OPSET:
        try:
            model = convert_version(model, OLDEST_OPSET)
        except RuntimeError as error:
            raise PipelineError(
                f"cannot quantise: opset {opset} cannot be raised to {OLDEST_OPSET}: {error}"
            ) from error
    model = optimized(model, onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC)
    pool_globally(model.graph)
    unroll_normalisation(model.graph)
    used = {node.domain for node in model.graph.node}
    imports = [o for o in model.opset_import if o.domain in used | {""}]
    del model.opset_import[:]
    model.opset_import.extend(imports)
    for number, node in enumerate(model.graph.node):
        node.name = node.name or f"{node.op_type}_{number}"
    model = infer_shapes(model)
    dims = model.graph.input[0].type.tensor_type.shape.dim
    graph = Graph(model, dims[0].dim_value or None if dims else None)
    if not any(node.op_type == "Conv" for node in model.graph.node):
        raise PipelineError(
            f"cannot quantise: {source.name} has no convolution; its linear layers are for dynamic int8"
        )
    return graph


def optimized(model: onnx.ModelProto, level: Any) -> onnx.ModelProto:
    """Return the graph as ONNX Runtime rewrites it at `level`; `PipelineError` when it refuses the graph."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = level
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    with tempfile.TemporaryDirectory() as folder:
        options.optimized_model_filepath = str(Path(folder) / "optimized.onnx")
        try:
            onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime's exceptions have no common base
            raise PipelineError(f"cannot quantise: {' '.join(str(error).split())[:300]}") from error
        return onnx.load(options.optimized_model_filepath)


def census(model: onnx.ModelProto) -> dict[str, int]:
    """Return how many operators of each kind run on this machine, once everything is fused that can be."""
    ran = optimized(model, onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL)
    return dict(sorted(Counter(node.op_type for node in ran.graph.node).items()))


def layers_of(graph: Graph, *, without: Collection[str] = ()) -> list[str]:
    """Return the names of the layers with weights that are int8 when those in `without` are not, in order."""
    nodes = {node.name: node for node in graph.model.graph.node}
    return [name for name in selection(graph, without=without) if nodes[name].op_type in LAYERS]


def selection(graph: Graph, *, without: Collection[str] = ()) -> list[str]:
    """Return the names of the nodes to quantize: every layer but those in `without`, and what only follows int8."""
    weights, floats = graph.weights(), graph.floats()
    int8: set[str] = set()
    chosen: list[str] = []
    for node in graph.model.graph.node:
        if node.name in without:
            continue
        taken = [name for name in node.input if name in floats]
        if node.op_type in LAYERS:
            fits = len(taken) == 1 and node.input[1] in weights and (node.op_type == "Conv" or taken[0] in int8)
        else:
            fits = node.op_type in FOLLOWERS and bool(taken) and set(taken) <= int8
            fits = fits and (node.op_type not in SEVERAL or len(taken) == len(node.input))
        if fits:
            chosen.append(node.name)
            int8 |= set(node.output)
    return chosen


def absorbed(graph: Graph) -> dict[str, onnx.NodeProto]:
    """Return, by the tensor that they take, the activations which the layer before them can do in int8."""
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.model.graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    given = {output.name for output in graph.model.graph.output}
    sole = {name: nodes[0] for name, nodes in readers.items() if len(nodes) == 1 and name not in given}
    return {name: node for name, node in sole.items() if node.op_type in ACTIVATIONS and name == node.input[0]}


def alone(graph: Graph, layer: str) -> list[str]:
    """Return the nodes to quantize so that only `layer` is int8: itself and the activation that it absorbs."""
    output = next(node.output[0] for node in graph.model.graph.node if node.name == layer)
    activation = absorbed(graph).get(output)
    return [layer] if activation is None else [layer, activation.name]


def tensors_of(graph: Graph) -> list[str]:
    """Return the tensors whose ranges `quantize` needs."""
    chosen, floats, inside = set(selection(graph)), graph.floats(), absorbed(graph)
    nodes = [node for node in graph.model.graph.node if node.name in chosen]
    touched = dict.fromkeys(name for node in nodes for name in (*node.input, *node.output))
    return [name for name in touched if name in floats and name not in inside]


def quantize(graph: Graph, ranges: Mapping[str, Range], *, nodes: Sequence[str], bits: int) -> onnx.ModelProto:
    """Return a copy in which `nodes` take and give uint8, with int8 weights per output channel of 7 or 8 bits.

    ONNX Runtime fuses the pairs into QLinearConv and its like. Answers stay float32: the last layer's are not rounded.
    """
    from onnxruntime.quantization import QuantType
    from onnxruntime.quantization.calibrate import CalibrationMethod, TensorData, TensorsData
    from onnxruntime.quantization.qdq_quantizer import QDQQuantizer

    model = onnx.ModelProto()
    model.CopyFrom(graph.model)
    limits = {
        name: TensorData(lowest=np.array(low, np.float32), highest=np.array(high, np.float32))
        for name, (low, high) in ranges.items()
    }
    inside = {name: limits[node.output[0]] for name, node in absorbed(graph).items() if node.output[0] in limits}
    quantizer = QDQQuantizer(
        model,
        per_channel=True,
        reduce_range=bits == 7,
        weight_qType=QuantType.QInt8,
        activation_qType=QuantType.QUInt8,
        tensors_range=TensorsData(CalibrationMethod.MinMax, inside | limits),
        nodes_to_quantize=list(nodes),
        nodes_to_exclude=[],
        op_types_to_quantize=[*LAYERS, *FOLLOWERS],
        extra_options={"OpTypesToExcludeOutputQuantization": ["Gemm"]},
    )
    quantizer.quantize_model()
    quantizer.model.topological_sort()
    quantized: onnx.ModelProto = quantizer.model.model
    del quantized.graph.value_info[:]
    return quantized


def weight_bytes(source: Path) -> int:
    """Return the size of an ONNX file with the weights that lie beside it."""
    tensors = onnx.load(source, load_external_data=False).graph.initializer
    beside = {entry.value for t in tensors for entry in t.external_data if entry.key == "location"}
    return sum(path.stat().st_size for path in (source, *(source.parent / name for name in beside)))


def _load(source: Path) -> onnx.ModelProto:
    try:
        return onnx.load(source)
    except Exception as error:  # protobuf's own, a missing sidecar's and others
        raise PipelineError(f"cannot quantise: {source.name} cannot be read as ONNX: {error}") from error


def _refuse(model: onnx.ModelProto) -> None:
    """Raise `PipelineError` that names the first node which stands in the way."""
    halves = _halves(model.graph)
    for number, node in enumerate(model.graph.node):
        name = node.name or f"{node.op_type} number {number}"
        if node.op_type in QUANTIZED or node.op_type.startswith(("QLinear", "QGemm", "MatMulInteger")):
            why = f"{node.op_type} is int8 already; start from the float graph"
        elif node.domain not in KNOWN_DOMAINS:
            why = f"ONNX Runtime does not know the domain {node.domain!r}; export without its operators"
        elif node.op_type != "Cast" and halves & set(node.input):
            why = "it computes in float16; export the model in float32"
        else:
            continue
        raise PipelineError(f"cannot quantise: node {name} because {why}")


def _halves(graph: onnx.GraphProto) -> set[str]:
    """Return the names of the float16 tensors that the file says or makes."""
    kinds = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
    names = {tensor.name for tensor in graph.initializer if tensor.data_type in kinds}
    names |= {value.name for value in graph.input if value.type.tensor_type.elem_type in kinds}
    for node in graph.node:
        options = {attribute.name: attribute for attribute in node.attribute}
        if node.op_type == "Cast" and options["to"].i in kinds:
            names.add(node.output[0])
        if node.op_type == "Constant" and "value" in options and options["value"].t.data_type in kinds:
            names.add(node.output[0])
    return names
