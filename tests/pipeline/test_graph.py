"""Layers, operators and parameters are found in graphs as exported, and as ONNX Runtime rewrites them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import NodeProto, TensorProto, helper, numpy_helper

from pipeline.compression.rebuild import rebuild
from pipeline.export import export_onnx
from pipeline.graph import (
    SCOPES,
    as_run,
    census,
    compare_layers,
    count_parameters,
    float_layers,
    homes_of,
    layer_bytes,
    layer_of_node,
    ran_homes,
)
from pipeline.models import ModelSpec

IMAGE = np.random.default_rng(0).integers(0, 255, (2, 8, 8, 3), np.uint8)


def write(path: Path, nodes: Sequence[NodeProto], constants: dict[str, np.ndarray]) -> Path:
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("images", TensorProto.UINT8, ["N", 8, 8, 3])],
        [helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["N", 4])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    return path


def convolutional(path: Path, *, width: int) -> Path:
    """Write normalisation, two convolutions of `width` channels with ReLU and a linear layer, as the exporter names."""
    draw = np.random.default_rng(0).standard_normal
    constants = {
        "model.mean": np.zeros((1, 3, 1, 1), np.float32),
        "model.net.conv1.weight": draw((width, 3, 3, 3)).astype(np.float32),
        "model.net.conv1.weight_bias": np.ones(width, np.float32),
        "model.net.conv2.weight": draw((width, width, 3, 3)).astype(np.float32),
        "model.net.conv2.weight_bias": np.ones(width, np.float32),
        "model.net.fc.weight": draw((4, width)).astype(np.float32),
        "model.net.fc.bias": np.array([0, 0, 1, 1], np.float32),
        "flat": np.array([-1, width]),
    }
    node = helper.make_node
    nodes = [
        node("Transpose", ["images"], ["permute"], perm=[0, 3, 1, 2]),
        node("Cast", ["permute"], ["cast"], to=TensorProto.FLOAT),
        node("Sub", ["cast", "model.mean"], ["sub"], name="node_sub"),
        node(
            "Conv",
            ["sub", "model.net.conv1.weight", "model.net.conv1.weight_bias"],
            ["c1"],
            name="node_conv_1",
            pads=[1, 1, 1, 1],
        ),
        node("Relu", ["c1"], ["r1"], name="node_relu_1"),
        node(
            "Conv",
            ["r1", "model.net.conv2.weight", "model.net.conv2.weight_bias"],
            ["c2"],
            name="node_conv_2",
            pads=[1, 1, 1, 1],
        ),
        node("Add", ["c2", "r1"], ["added"], name="node_add"),
        node("GlobalAveragePool", ["added"], ["pooled"]),
        node("Reshape", ["pooled", "flat"], ["view"], name="node_view"),
        node("Gemm", ["view", "model.net.fc.weight", "model.net.fc.bias"], ["logits"], transB=1),
        node("Softmax", ["logits"], ["probabilities"]),
    ]
    return write(path, nodes, constants)


def test_what_follows_a_layer_belongs_to_it_and_what_comes_first_to_the_input(tmp_path: Path) -> None:
    homes = layer_of_node(convolutional(tmp_path / "g.onnx", width=16))
    assert homes == {
        "node_sub": "(input)",
        "node_conv_1": "conv1",
        "node_relu_1": "conv1",
        "node_conv_2": "conv2",
        "node_add": "conv2",
        "node_view": "conv2",
    }


def test_bytes_are_those_of_each_layers_constants(tmp_path: Path) -> None:
    sizes = layer_bytes(convolutional(tmp_path / "g.onnx", width=16))
    assert sizes == {
        "(input)": 3 * 4,
        "model.net.conv1": (16 * 27 + 16) * 4,
        "model.net.conv2": (16 * 144 + 16) * 4 + 2 * 8,  # and the shape before the linear layer
        "model.net.fc": (4 * 16 + 4) * 4,
    }


def test_layers_of_a_rewritten_graph_are_found_again(tmp_path: Path) -> None:
    dense, narrow = (convolutional(tmp_path / f"{width}.onnx", width=width) for width in (32, 16))
    kinds = census(as_run(dense))
    assert kinds["Conv"] == 2
    assert "Relu" not in kinds  # fused, so what is left of it has another name
    layers = compare_layers(dense, narrow, IMAGE)
    assert [layer.name for layer in layers] == ["(input)", "conv1", "conv2", "fc"]
    assert all(layer.dense_us > 0 and layer.us > 0 for layer in layers)
    by_name = {layer.name: layer for layer in layers}
    assert (by_name["conv2"].dense_bytes, by_name["conv2"].bytes) == (
        (32 * 288 + 32) * 4 + 16,
        (16 * 144 + 16) * 4 + 16,
    )


def test_convolution_without_a_bias_is_found_though_its_weights_are_rearranged(tmp_path: Path) -> None:
    path = convolutional(tmp_path / "g.onnx", width=16)
    model = onnx.load(path)
    del model.graph.node[5].input[2]
    onnx.save(model, path)
    ran = as_run(path)
    homes = [h for h, node in zip(ran_homes(model, ran), ran.graph.node, strict=True) if node.op_type == "Conv"]
    assert homes == ["model.net.conv1", "model.net.conv2"]


def test_parameters_are_weights_and_biases_without_scales_shapes_and_normalisation(tmp_path: Path) -> None:
    assert count_parameters(convolutional(tmp_path / "g.onnx", width=16)) == (
        16 * 27 + 16 + 16 * 144 + 16 + 4 * 16 + 4,
        16 * 27 + 16 + 16 * 144 + 16 + 4 * 16 + 2,
    )


def int8(path: Path) -> Path:
    """Write a row-wise int8 linear layer, as the exporter writes it: scale and rounding are called in its module."""
    constants = {
        "flat": np.array([-1, 192]),
        "model.net.fc.weight": np.tile(np.array([0, 1, 2, 3], np.int8), (192, 1)),
        "model.net.fc.scale": np.ones(4, np.float32),
        "model.net.fc.bias": np.ones(4, np.float32),
        "step": np.array(1.0, np.float32),
        "zero": np.array(128, np.uint8),
    }
    node = helper.make_node
    nodes = [
        node("Cast", ["images"], ["cast"], to=TensorProto.FLOAT),
        node("Reshape", ["cast", "flat"], ["view"]),
        node("QuantizeLinear", ["view", "step", "zero"], ["codes"], name="node_codes"),
        node(
            "MatMulIntegerToFloat",
            ["codes", "model.net.fc.weight", "step", "model.net.fc.scale", "zero"],
            ["product"],
            domain="com.microsoft",
        ),
        node("Add", ["product", "model.net.fc.bias"], ["logits"]),
        node("Softmax", ["logits"], ["probabilities"]),
    ]
    entry = nodes[2].metadata_props.add()
    entry.key, entry.value = SCOPES, "['', 'model', 'model.net', 'model.net.fc', 'symbolic']"
    return write(path, nodes, constants)


def test_int8_weights_count_and_their_scales_do_not(tmp_path: Path) -> None:
    assert count_parameters(int8(tmp_path / "g.onnx")) == (192 * 4 + 4, 192 * 3 + 4)


def test_operation_called_in_a_layers_module_belongs_to_it_though_it_comes_before(tmp_path: Path) -> None:
    by_value, _ = homes_of(onnx.load(int8(tmp_path / "g.onnx")))
    assert by_value["view"] == "(input)"
    assert by_value["codes"] == "model.net.fc"


def test_float_layers_are_those_whose_weights_are_float_in_the_file(tmp_path: Path) -> None:
    assert float_layers(convolutional(tmp_path / "f.onnx", width=16)) == ["conv1", "conv2", "fc"]
    assert float_layers(int8(tmp_path / "i.onnx")) == []


def test_exported_network_has_the_layers_of_its_modules(tmp_path: Path) -> None:
    spec = ModelSpec(name="lenet", num_classes=10, channels=3, height=16, width=16, mean=(0.0,) * 3, std=(1.0,) * 3)
    path = tmp_path / "g.onnx"
    export_onnx(rebuild(spec), path, opset=20, metadata={})
    images = np.zeros((2, 16, 16, 3), np.uint8)
    found = [layer.name for layer in compare_layers(path, path, images)]
    assert found == ["(input)", "conv1", "conv2", "fc1", "fc2"]
    assert count_parameters(path)[0] == (250 * 3 + 10) + (5000 + 20) + (1000 + 50) + (500 + 10)


@pytest.mark.parametrize("name", ["weight", "onnx::Conv_42"])
def test_layer_without_a_module_is_called_after_its_node(tmp_path: Path, name: str) -> None:
    path = convolutional(tmp_path / "g.onnx", width=16)
    model = onnx.load(path)
    model.graph.initializer[1].name = model.graph.node[3].input[1] = name
    model.graph.initializer[2].name = model.graph.node[3].input[2] = f"{name}_bias"
    onnx.save(model, path)
    assert layer_of_node(path)["node_relu_1"] == "node_conv_1"
