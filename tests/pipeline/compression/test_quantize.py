"""Row-wise int8: close to fp32, exact for every row whoever its neighbours are, and the same bits in ONNX Runtime."""

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from pipeline.compression.quantize import RowwiseInt8Linear, row_steps, weight_steps
from tests.pipeline.compression.graphs import answer, exported

NAN, INF = float("nan"), float("inf")


def layer(*, bits: int = 7, inputs: int = 64, outputs: int = 32) -> tuple[nn.Linear, RowwiseInt8Linear]:
    torch.manual_seed(0)
    linear = nn.Linear(inputs, outputs)
    return linear, RowwiseInt8Linear.from_linear(linear, bits=bits)


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> onnxruntime.InferenceSession:
    path: Path = tmp_path_factory.mktemp("onnx") / "layer.onnx"
    return exported(layer()[1], (64,), path)


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


@pytest.mark.parametrize("neighbour", [0.0, 1.0, 1e6, -3e34, NAN, INF])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_answer_is_bit_identical_whoever_shares_the_batch(
    session: onnxruntime.InferenceSession, neighbour: float, size: int
) -> None:
    row = torch.randn(1, 64, generator=torch.Generator().manual_seed(1))
    batch = torch.full((size, 64), neighbour)
    batch[-1] = row[0]
    assert np.array_equal(answer(session, batch)[-1], answer(session, row)[0])
    int8 = layer()[1]
    assert torch.equal(int8(batch)[-1], int8(row)[0])


@pytest.mark.parametrize("inputs", [64, 3000])
def test_onnx_runtime_computes_the_bits_that_pytorch_does(tmp_path: Path, inputs: int) -> None:
    """3,000 products of up to 127 x 63 with one sign are more than float32 sums exactly."""
    linear = layer(inputs=inputs)[0]
    with torch.no_grad():
        linear.weight.abs_().add_(1.0)
    int8 = RowwiseInt8Linear.from_linear(linear, bits=7)
    x = torch.randn(33, inputs, generator=torch.Generator().manual_seed(2))
    x[0] = 1 - x[0].abs() / 100
    assert np.array_equal(answer(exported(int8, (inputs,), tmp_path / "layer.onnx"), x), int8(x).numpy())


@pytest.mark.parametrize("row", [torch.zeros(64), torch.full((64,), 1e-38), torch.full((64,), 3.0)])
def test_row_of_equal_values_is_finite_and_right(session: onnxruntime.InferenceSession, row: Tensor) -> None:
    linear, int8 = layer()
    x = row.repeat(2, 1)
    with torch.no_grad():
        expected = linear(x).numpy()
    assert np.array_equal(answer(session, x), int8(x).numpy())
    assert np.abs(int8(x).numpy() - expected).max() < 0.05


def test_row_of_zeros_gives_the_bias(session: onnxruntime.InferenceSession) -> None:
    int8 = layer()[1]
    assert int8.bias is not None
    assert np.array_equal(answer(session, torch.zeros(1, 64))[0], int8.bias.numpy())


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("place", [0, 1, 31, 63])
def test_row_with_a_value_that_is_not_finite_is_nan_in_every_output(
    session: onnxruntime.InferenceSession, value: float, place: int
) -> None:
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(3))
    x[1, place] = value
    for answers in (answer(session, x), layer()[1](x).numpy()):
        assert np.isnan(answers[1]).all()
        assert np.isfinite(answers[[0, 2]]).all()


def test_steps_of_a_row_follow_its_largest_magnitude() -> None:
    rows = torch.tensor([[1.0, -127.0], [254.0, 0.0], [0.0, 0.0], [NAN, 1.0], [-INF, 1.0]])
    assert row_steps(rows)[:2].tolist() == pytest.approx([1.0, 2.0])
    assert 0 < float(row_steps(rows)[2]) < 1e-30
    assert row_steps(rows)[3:].isnan().all()


def test_layer_without_bias_has_none() -> None:
    int8 = RowwiseInt8Linear.from_linear(nn.Linear(8, 4, bias=False), bits=8)
    assert int8(torch.zeros(1, 8)).tolist() == [[0, 0, 0, 0]]
    assert sorted(int8.state_dict()) == ["scale", "weight"]


def test_leading_dimensions_stay(session: onnxruntime.InferenceSession) -> None:
    int8 = layer()[1]
    x = torch.randn(2, 3, 5, 64)
    assert int8(x).shape == (2, 3, 5, 32)
    assert torch.equal(int8(x).reshape(-1, 32), int8(x.reshape(-1, 64)))
