"""What int8 gains on this machine: each shape of a linear layer, in float32 and in int8, in ONNX Runtime.

The results are kept in the cache, so that a stage that runs again decides, and publishes, the same.
"""

import hashlib
import json
import os
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from pipeline.artifact import canonical, exclusive
from pipeline.compression.layers import Shape
from pipeline.compression.quantize import ACTIVATION_STEPS, TINY, ZERO_POINT, weight_steps
from pipeline.machine import cpu_facts
from pipeline.measure import measure_interleaved, ratio
from pipeline.session import open_session
from pipeline.source import source_digest

ROUNDS = 11
OPSET = 20


def measured_gains(shapes: Collection[Shape], *, bits: int, cache: Path) -> dict[Shape, float]:
    """Return how many times cheaper int8 is for each shape: measured once, then read from the cache."""
    conditions = {
        "bits": bits,
        "cpu": cpu_facts(),
        "onnxruntime": onnxruntime.__version__,
        "source": source_digest("pipeline.compression.gains"),
    }
    digest = hashlib.sha256(canonical(conditions).encode()).hexdigest()
    path = cache / f"gains-{digest[:16]}.json"
    with exclusive(path.with_suffix(".lock")):
        known: dict[str, Any] = json.loads(path.read_text())["gains"] if path.is_file() else {}
        for shape in sorted(shapes, key=str):
            if str(shape) not in known:
                known[str(shape)] = measure(shape, bits=bits, folder=cache)
                _replace(path, json.dumps(conditions | {"gains": known}, indent=2))
    return {shape: float(known[str(shape)]) for shape in shapes}


def measure(shape: Shape, *, bits: int, folder: Path) -> float:
    """Return the CPU time of the layer in float32 over that in int8, one thread, as the median of paired rounds."""
    generator = np.random.default_rng(0)
    weight_OI = generator.uniform(-1, 1, (shape.outputs, shape.inputs)).astype(np.float32)
    rows_RI = generator.standard_normal((shape.rows, shape.inputs)).astype(np.float32)
    calls = {}
    for name, graph in {"fp32": float_graph(weight_OI), "int8": int8_graph(weight_OI, bits=bits)}.items():
        path = folder / f"gains-{os.getpid()}.onnx"
        path.write_bytes(graph.SerializeToString())
        calls[name] = partial(open_session(path).run, None, {"x": rows_RI})
        path.unlink()
    costs = measure_interleaved(calls, rounds=ROUNDS)
    return ratio(costs["fp32"], costs["int8"]).median


def float_graph(weight_OI: NDArray[np.float32]) -> onnx.ModelProto:
    """Return a graph of the layer as the exporter writes it for `nn.Linear`."""
    bias_O = np.zeros(len(weight_OI), np.float32)
    nodes = [helper.make_node("Gemm", ["x", "weight", "bias"], ["y"], transB=1)]
    return _graph(nodes, {"weight": weight_OI, "bias": bias_O}, weight_OI)


def int8_graph(weight_OI: NDArray[np.float32], *, bits: int) -> onnx.ModelProto:
    """Return a graph of the layer as the exporter writes it for `RowwiseInt8Linear`."""
    scale_O = (np.abs(weight_OI).max(axis=1) / weight_steps(bits)).astype(np.float32)
    node = helper.make_node
    nodes = [
        node("Reshape", ["x", "flat"], ["rows"]),
        node("ReduceMax", ["rows", "last"], ["max"], keepdims=0),
        node("ReduceMin", ["rows", "last"], ["min"], keepdims=0),
        node("Neg", ["min"], ["-min"]),
        node("Max", ["max", "-min"], ["largest"]),
        node("ReduceSum", ["rows", "last"], ["sum"], keepdims=0),
        node("Mul", ["sum", "nothing"], ["finite"]),
        node("Max", ["largest", "tiny"], ["not 0"]),
        node("Mul", ["not 0", "per step"], ["even if not finite"]),
        node("Add", ["even if not finite", "finite"], ["step"]),
        node("Shape", ["step"], ["row count"]),
        node("Expand", ["zero point", "row count"], ["zero points"]),
        node("QuantizeLinear", ["rows", "step", "zero points"], ["codes"], axis=0),
        node("Unsqueeze", ["step", "last"], ["step column"]),
        node(
            "MatMulIntegerToFloat",
            ["codes", "weight", "step column", "scale", "zero point"],
            ["product"],
            domain="com.microsoft",
        ),
        node("Add", ["product", "bias"], ["y"]),
    ]
    constants = {
        "flat": np.array([-1, weight_OI.shape[1]]),
        "last": np.array([-1]),
        "nothing": np.array(0.0, np.float32),
        "tiny": np.array(TINY, np.float32),
        "per step": np.array(1 / ACTIVATION_STEPS, np.float32),
        "zero point": np.array(ZERO_POINT, np.uint8),
        "weight": np.ascontiguousarray(np.rint(weight_OI / scale_O[:, None]).astype(np.int8).T),
        "scale": scale_O,
        "bias": np.zeros(len(weight_OI), np.float32),
    }
    return _graph(nodes, constants, weight_OI)


def _graph(
    nodes: list[onnx.NodeProto], constants: dict[str, NDArray[Any]], weight_OI: NDArray[np.float32]
) -> onnx.ModelProto:
    outputs, inputs = weight_OI.shape
    graph = helper.make_graph(
        nodes,
        "layer",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", inputs])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", outputs])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def _replace(path: Path, text: str) -> None:
    """Write a file so that whoever reads it, even after a kill, finds it whole."""
    partial_path = path.with_suffix(".partial")
    partial_path.write_text(text)
    partial_path.replace(path)
