"""Odd graphs are quantized or named with the reason; an int8 graph is never quantized again."""

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import TensorProto, numpy_helper

from pipeline.compression.calibrate import Static, quantize_static
from pipeline.compression.qdq import layers_of, prepare, selection, weight_bytes
from pipeline.errors import PipelineError
from tests.pipeline.compression.static_graphs import Validation, write_network

WEIGHTS = np.random.default_rng(0).standard_normal((4, 3, 3, 3)).astype(np.float32)
BODY = "c = Conv(x, w) r = Relu(c) m = GlobalAveragePool(r) y = Flatten(m)"


def write(
    folder: Path, *, body: str = BODY, opset: int = 13, batch: str = "N", number: str = "float", imports: str = ""
) -> Path:
    """Write a graph [N, 3, 8, 8] -> [N, 4] with one convolution."""
    text = f"""<ir_version: 7, opset_import: ["": {opset}{imports}]>
    g ({number}[{batch}, 3, 8, 8] x) => ({number}[{batch}, 4] y) {{ {body} }}"""
    model = onnx.parser.parse_model(text)
    model.graph.node[0].name = "first"
    half = WEIGHTS.astype(np.float16)
    tensor = numpy_helper.from_array(half if number == "float16" or "Cast" in body else WEIGHTS, "w")
    model.graph.initializer.append(tensor)
    if opset < 11:  # as exporters of that time did
        model.graph.input.append(onnx.helper.make_tensor_value_info("w", TensorProto.FLOAT, WEIGHTS.shape))
    onnx.save(model, folder / "odd.onnx")
    return folder / "odd.onnx"


def quantized(source: Path) -> Static:
    images = np.random.default_rng(1).standard_normal((20, 3, 8, 8)).astype(np.float32)
    return quantize_static(
        source,
        source.with_name("int8.onnx"),
        images=images,
        validation=Validation(images),
        labels=np.zeros(20, np.int64),
        methods=("minmax",),
        max_loss=100.0,
        bits=7,
    )


def refusal(source: Path) -> str:
    """Return why the graph is refused; the file stays as it is and nothing else appears."""
    before = source.read_bytes()
    with pytest.raises(PipelineError) as caught:
        quantized(source)
    assert source.read_bytes() == before
    assert [path.name for path in source.parent.iterdir()] == [source.name]
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("opset", [10, 11, 12, 13, 17, 18, 20])
def test_every_opset_is_quantized(tmp_path: Path, opset: int) -> None:
    static = quantized(write(tmp_path, opset=opset))
    assert static.operators["QLinearConv"] == 1
    assert static.opset == max(opset, 13)
    assert static.trial.error < 0.05


def test_weights_from_a_cast_are_folded(tmp_path: Path) -> None:
    static = quantized(write(tmp_path, body="k = Cast<to = 1>(w) " + BODY.replace("w)", "k)")))
    assert static.operators["QLinearConv"] == 1


def test_unnamed_dynamic_batch_stays_dynamic(tmp_path: Path) -> None:
    source = write(tmp_path)
    model = onnx.load(source)
    model.graph.input[0].type.tensor_type.shape.dim[0].Clear()
    onnx.save(model, source)
    assert quantized(source).operators["QLinearConv"] == 1
    assert not onnx.load(tmp_path / "int8.onnx").graph.input[0].type.tensor_type.shape.dim[0].dim_value


def test_fixed_batch_is_fed_full_batches(tmp_path: Path) -> None:
    static = quantized(write(tmp_path, batch="3"))  # 20 images are no multiple of 3
    assert static.operators["QLinearConv"] == 1
    assert static.trial.error < 0.05


def test_float16_is_refused(tmp_path: Path) -> None:
    source = write(tmp_path, number="float16")
    assert refusal(source) == (
        "cannot quantise: node first because it computes in float16; export the model in float32"
    )


def test_foreign_operator_is_named(tmp_path: Path) -> None:
    source = write(tmp_path, body=f"z = mine.Magic(x) {BODY.replace('x', 'z')}", imports=', "mine": 1')
    assert refusal(source).startswith(
        "cannot quantise: node first because ONNX Runtime does not know the domain 'mine'"
    )


def test_int8_graph_is_not_quantized_again(tmp_path: Path) -> None:
    quantized(write(tmp_path))
    (tmp_path / "odd.onnx").unlink()
    why = refusal(tmp_path / "int8.onnx")
    assert why.endswith("because DequantizeLinear is int8 already; start from the float graph")


def test_graph_without_convolution_is_refused(tmp_path: Path) -> None:
    source = write(tmp_path, body="m = GlobalAveragePool(x) f = Flatten(m) y = Identity(f)")
    assert "has no convolution" in refusal(source)


def test_file_that_is_no_graph_is_refused(tmp_path: Path) -> None:
    (tmp_path / "odd.onnx").write_bytes(b"not a graph")
    assert refusal(tmp_path / "odd.onnx").startswith("cannot quantise: odd.onnx cannot be read as ONNX")


def test_graph_that_onnx_runtime_refuses_is_refused(tmp_path: Path) -> None:
    source = write(tmp_path, body=BODY.replace("Relu(c)", "NoSuchOperator(c)"))
    assert refusal(source).startswith("cannot quantise: ")


def test_only_what_follows_int8_is_int8(tmp_path: Path) -> None:
    body = """t = Transpose<perm = [0, 3, 1, 2]>(images) f = Cast<to = 1>(t) n = Add(f, f)
      a = Conv<pads = [1, 1, 1, 1]>(n, w1, b1) s = Softplus(a) e = Add(s, a) r = Relu(e)
      m = GlobalAveragePool(r) v = Reshape(m, flat) probabilities = Gemm<transB = 1>(v, w3, b3)"""
    graph = prepare(write_network(tmp_path / "float.onnx", body=body))
    nodes = {node.name: node.op_type for node in graph.model.graph.node}
    assert [nodes[name] for name in selection(graph)] == ["Conv"]  # a sum with a float tensor stays float


def test_gates_are_int8(tmp_path: Path) -> None:
    static = quantized(write(tmp_path, body=BODY.replace("r = Relu(c)", "s = Sigmoid(c) r = Mul(c, s)")))
    assert (static.operators["QLinearSigmoid"], static.operators["QLinearMul"]) == (1, 1)
    assert not static.operators.keys() & {"Sigmoid", "Mul"}


def test_normalisation_runs_over_rows_before_the_channels_move(tmp_path: Path) -> None:
    graph = prepare(write_network(tmp_path / "float.onnx"))
    order = [node.op_type for node in graph.model.graph.node]
    assert order.index("Sub") < order.index("Transpose") < order.index("Conv")


def test_layer_after_one_that_is_given_back_follows_it(tmp_path: Path) -> None:
    graph = prepare(write_network(tmp_path / "float.onnx"))
    first, second, last = layers_of(graph)
    assert layers_of(graph, without={first}) == [second]  # its sum has a float side now, and so the linear layer
    assert last not in layers_of(graph, without={second})


def test_bytes_beside_the_graph_count(tmp_path: Path) -> None:
    source = write(tmp_path)
    onnx.save(onnx.load(source), source, save_as_external_data=True, location="odd.data", size_threshold=0)
    assert weight_bytes(source) == source.stat().st_size + WEIGHTS.nbytes
