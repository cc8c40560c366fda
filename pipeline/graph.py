"""What an ONNX graph is made of: parameters, operators as ONNX Runtime runs them, and layers with their bytes and time.

A layer is what has weights, together with what is computed from its output up to the next one.
"""

import ast
import json
import tempfile
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, numpy_helper

from pipeline.compression.qdq import optimized

INPUT = "(input)"  # what comes before the first layer: layout and normalisation of the pixels
OURS = "model.net."  # where the exported classifier keeps the network
SCOPES = "pkg.torch.onnx.name_scopes"
MOVED = "_nchwc"  # what ONNX Runtime appends when it moves a convolution to another layout
# Inputs that are scales and zero points, not parameters.
SCALES = {
    "QuantizeLinear": (1, 2),
    "DequantizeLinear": (1, 2),
    "MatMulIntegerToFloat": (2, 3, 4, 5),
}
NUMBERS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.INT8, TensorProto.UINT8)
PROFILED = "_kernel_time"
RUNS = 51


@dataclass(frozen=True)
class Layer:
    """One layer in two graphs. Microseconds are wall time of one image in ONNX Runtime's profiler."""

    name: str
    dense_bytes: int
    bytes: int
    dense_us: float
    us: float


def count_parameters(path: Path) -> tuple[int, int]:
    """Return how many weights and biases the layers hold, and how many of them are not zero."""
    model = onnx.load(path)
    homes, _ = homes_of(model)
    used = {
        name
        for node in model.graph.node
        for position, name in enumerate(node.input)
        if position not in SCALES.get(node.op_type, ()) and homes[node.output[0]] != INPUT
    }
    tensors = [t for t in model.graph.initializer if t.name in used and t.dims and _is_number(t)]
    arrays = [numpy_helper.to_array(t) for t in tensors]
    return sum(a.size for a in arrays), sum(int(np.count_nonzero(a)) for a in arrays)


def _is_number(tensor: TensorProto) -> bool:
    """Tell weights from shapes, axes and the like; an int32 bias is what a QDQ graph has beside int8 weights."""
    return tensor.data_type in NUMBERS or (tensor.data_type == TensorProto.INT32 and "bias" in tensor.name)


def as_run(path: Path) -> ModelProto:
    """Return the graph after ONNX Runtime's own optimizations: what runs on this machine."""
    return optimized(onnx.load(path), onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL)


def census(model: ModelProto) -> dict[str, int]:
    """Return how many operators of each kind there are, the most frequent first."""
    kinds = Counter(node.op_type for node in model.graph.node)
    return dict(sorted(kinds.items(), key=lambda kind: (-kind[1], kind[0])))


def compare_layers(dense: Path, chosen: Path, images_BHWC: NDArray[np.uint8]) -> list[Layer]:
    """Return every layer of both graphs in the order of the network, with its bytes and its time."""
    bytes_of = [layer_bytes(path) for path in (dense, chosen)]
    us_of = profile((dense, chosen), images_BHWC)
    names = dict.fromkeys(name for us in us_of for name in us) | dict.fromkeys(name for b in bytes_of for name in b)
    return [
        Layer(
            name.removeprefix(OURS),
            bytes_of[0].get(name, 0),
            bytes_of[1].get(name, 0),
            us_of[0].get(name, 0.0),
            us_of[1].get(name, 0.0),
        )
        for name in names
    ]


def layer_bytes(path: Path) -> dict[str, int]:
    """Return the bytes of the constants of each layer."""
    model = onnx.load(path)
    homes, _ = homes_of(model)
    sizes = {tensor.name: numpy_helper.to_array(tensor).nbytes for tensor in model.graph.initializer}
    total: dict[str, int] = defaultdict(int)
    for node in model.graph.node:
        for name in node.input:
            total[homes[node.output[0]]] += sizes.pop(name, 0)  # a constant that two layers share belongs to the first
    return dict(total)


def profile(paths: tuple[Path, ...], images_BHWC: NDArray[np.uint8], *, runs: int = RUNS) -> list[dict[str, float]]:
    """Return the microseconds per image of each layer of each graph: the median of interleaved runs of its nodes.

    The graphs are profiled as they run, one thread each. Small nodes cost a little more than without the profiler.
    """
    with tempfile.TemporaryDirectory() as folder:
        opened = [_open_profiled(path, prefix=f"{folder}/{number}") for number, path in enumerate(paths)]
        for _ in range(runs):
            for session, _ in opened:
                session.run(["probabilities"], {"images": images_BHWC})
        return [_layer_times(session, homes, images=len(images_BHWC)) for session, homes in opened]


def _open_profiled(path: Path, *, prefix: str) -> tuple[onnxruntime.InferenceSession, list[str]]:
    """Open the graph as it runs, with nodes named by their number, and return each node's layer."""
    original, ran = onnx.load(path), as_run(path)
    homes = ran_homes(original, ran)
    for number, node in enumerate(ran.graph.node):
        node.name = str(number)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL  # that is done
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.enable_profiling = True
    options.profile_file_prefix = prefix
    session = onnxruntime.InferenceSession(ran.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session, homes


def _layer_times(session: onnxruntime.InferenceSession, homes: list[str], *, images: int) -> dict[str, float]:
    events: list[dict[str, Any]] = json.loads(Path(session.end_profiling()).read_text())
    taken: dict[int, list[float]] = {number: [] for number in range(len(homes))}
    for event in events:
        name = event["name"].removesuffix(PROFILED)
        if event["cat"] == "Node" and event["name"].endswith(PROFILED) and name.isdecimal():
            taken[int(name)].append(event["dur"])
    total: dict[str, float] = defaultdict(float)
    for number, durations in taken.items():
        total[homes[number]] += float(np.median(durations)) / images if durations else 0.0
    return dict(total)


def ran_homes(original: ModelProto, ran: ModelProto) -> list[str]:
    """Return the layer of each node of the graph as it runs, found through what is left of the original's names."""
    by_value, by_node = homes_of(original)
    homes: list[str] = []
    owner: dict[str, str] = {}
    constants = {tensor.name for tensor in ran.graph.initializer}
    for node in ran.graph.node:
        known = (
            _prefix(node, constants)
            or by_node.get(node.name)
            or by_value.get(node.name.removesuffix(MOVED))
            or next((by_value[name] for name in node.output if name in by_value), None)
            or _upstream(node, owner)
        )
        homes.append(known)
        owner |= dict.fromkeys(node.output, known)
    return homes


def homes_of(model: ModelProto) -> tuple[dict[str, str], dict[str, str]]:
    """Return the layer of every computed value, and of every node that has a name."""
    constants = {tensor.name for tensor in model.graph.initializer}
    matrices = {tensor.name for tensor in model.graph.initializer if sum(size > 1 for size in tensor.dims) > 1}
    layers = {_prefix(node, constants) for node in model.graph.node} - {None}
    by_value: dict[str, str] = {}
    by_node: dict[str, str] = {}
    for node in model.graph.node:
        own = _prefix(node, constants)
        if own is None and matrices & set(node.input):
            own = node.name or node.output[0]
        home = own or next((s for s in reversed(_scopes(node)) if s in layers), None) or _upstream(node, by_value)
        by_value |= dict.fromkeys(node.output, home)
        by_node |= {node.name: home} if node.name else {}
    return by_value, by_node


def _prefix(node: NodeProto, constants: set[str]) -> str | None:
    """Return the module whose weights the node reads: `net.conv` for `net.conv.weight`."""
    owners = [name.rpartition(".")[0] for name in node.input if name in constants and "." in name]
    return next((owner for owner in owners if owner not in ("", OURS.partition(".")[0])), None)


def _scopes(node: NodeProto) -> list[str]:
    """Return the modules in which PyTorch called the operation, the outermost first."""
    said = next((entry.value for entry in node.metadata_props if entry.key == SCOPES), "[]")
    return list(ast.literal_eval(said))


def _upstream(node: NodeProto, homes: Mapping[str, str]) -> str:
    return next((homes[name] for name in node.input if name in homes), INPUT)


def float_layers(path: Path) -> list[str]:
    """Return the layers whose weights are float numbers in the file, in the order of the network."""
    model = onnx.load(path)
    homes, _ = homes_of(model)
    floats = {
        tensor.name
        for tensor in model.graph.initializer
        if tensor.data_type == TensorProto.FLOAT and sum(size > 1 for size in tensor.dims) > 1
    }
    found = [homes[node.output[0]] for node in model.graph.node if floats & set(node.input)]
    return [name.removeprefix(OURS) for name in dict.fromkeys(found) if name != INPUT]


def layer_of_node(path: Path) -> dict[str, str]:
    """Return the layer of every node that has a name."""
    _, by_node = homes_of(onnx.load(path))
    return {node: home.removeprefix(OURS) for node, home in by_node.items()}
