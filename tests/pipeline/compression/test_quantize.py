"""Row-wise int8: close to fp32, exact for every row whoever its neighbours are, and the same in ONNX Runtime."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from pipeline.compression.quantize import RowwiseInt8Linear, quantize_linears, weight_steps
from pipeline.session import open_session


def layer(*, bits: int = 7, inputs: int = 64, outputs: int = 32) -> tuple[nn.Linear, RowwiseInt8Linear]:
    torch.manual_seed(0)
    linear = nn.Linear(inputs, outputs)
    return linear, RowwiseInt8Linear.from_linear(linear, bits=bits)


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> onnxruntime.InferenceSession:
    path: Path = tmp_path_factory.mktemp("onnx") / "layer.onnx"
    torch.onnx.export(
        layer()[1].eval(), (torch.zeros(2, 64),), path, dynamo=True, input_names=["x"], output_names=["y"],
        dynamic_shapes=({0: torch.export.Dim("rows")},), opset_version=20, external_data=False, verbose=False,
    )  # fmt: skip
    return open_session(path)


@pytest.mark.parametrize(("bits", "largest_error"), [(7, 0.02), (8, 0.012)])
def test_quantized_layer_is_close_to_the_original(bits: int, largest_error: float) -> None:
    linear, int8 = layer(bits=bits)
    x = torch.randn(100, 64)
    with torch.no_grad():
        expected = linear(x)
    error = (expected - int8(x)).abs().max() / expected.abs().max()
    assert 0 < float(error) < largest_error


@pytest.mark.parametrize("bits", [7, 8])
def test_weights_use_the_whole_range_and_nothing_beyond(bits: int) -> None:
    _, int8 = layer(bits=bits)
    assert set(int8.weight.abs().amax(dim=0).tolist()) == {weight_steps(bits)}


@pytest.mark.parametrize("neighbour", [0.0, 1.0, 1e6, -3e4])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_answer_is_bit_identical_whoever_shares_the_batch(
    session: onnxruntime.InferenceSession, neighbour: float, size: int
) -> None:
    row = torch.randn(1, 64, generator=torch.Generator().manual_seed(1))
    batch = torch.full((size, 64), neighbour)
    batch[-1] = row[0]
    alone = session.run(None, {"x": row.numpy()})[0][0]
    together = session.run(None, {"x": batch.numpy()})[0][-1]
    assert alone.tobytes() == together.tobytes()


def test_onnx_runtime_computes_what_pytorch_does(session: onnxruntime.InferenceSession) -> None:
    x = torch.randn(33, 64)
    answers = session.run(None, {"x": x.numpy()})[0]
    assert np.abs(answers - layer()[1](x).numpy()).max() < 1e-5


def test_row_of_zeros_gives_the_bias(session: onnxruntime.InferenceSession) -> None:
    _, int8 = layer()
    zeros = torch.zeros(2, 64)
    assert torch.equal(int8(zeros)[0], int8.bias)
    assert np.abs(session.run(None, {"x": zeros.numpy()})[0][0] - int8.bias.numpy()).max() == 0


def test_layer_without_bias_is_quantized() -> None:
    linear = nn.Linear(8, 4, bias=False)
    assert RowwiseInt8Linear.from_linear(linear, bits=8)(torch.zeros(1, 8)).tolist() == [[0, 0, 0, 0]]


def test_attention_that_reads_its_weights_itself_is_left_as_it_is() -> None:
    net = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).eval()
    x = torch.randn(2, 3, 16)
    with torch.no_grad():
        before = net(x)
        assert sorted(quantize_linears(net, bits=8)) == ["linear1", "linear2"]
        net.activation_relu_or_gelu = 0  # the fused path would read the weights of the two, too
        assert float((net(x) - before).abs().max()) < 0.05


def test_graph_uses_the_fused_int8_kernel(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    assert quantize_linears(net, bits=7) == {"0": 7, "2": 7}
    program = torch.onnx.export(net.eval(), (torch.zeros(2, 16),), dynamo=True, opset_version=20, verbose=False)
    assert program is not None
    kinds = [node.op_type for node in program.model_proto.graph.node]
    assert kinds.count("MatMulIntegerToFloat") == 2
    assert "MatMul" not in kinds
    assert "Gemm" not in kinds
    onnx.checker.check_model(program.model_proto)
