"""Ranges come from one pass: histograms add up whatever the order, and each method cuts what it says."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from pipeline.compression import ranges
from pipeline.compression.ranges import Histogram, collect
from pipeline.errors import PipelineError


def test_histograms_of_parts_add_up_to_that_of_the_whole() -> None:
    parts = [np.array([1.0, -0.5], np.float32), np.array([9.0, 0.1], np.float32), np.array([-70.0], np.float32)]
    whole = Histogram.of(np.concatenate(parts))
    total = Histogram.of(parts[0]) + Histogram.of(parts[1]) + Histogram.of(parts[2])
    assert (total.counts == whole.counts).all()
    assert (total.limit, total.low, total.high) == (whole.limit, -70.0, 9.0)


def test_every_value_is_counted_in_blocks() -> None:
    values = np.linspace(-1, 3, 3 * ranges.BLOCK + 7, dtype=np.float32)
    assert Histogram.of(values).counts.sum() == values.size


def test_minmax_keeps_an_outlier_and_percentile_cuts_it() -> None:
    values = np.append(np.random.default_rng(0).standard_normal(100_000), 40.0).astype(np.float32)
    histogram = Histogram.of(values)
    assert histogram.range_by("minmax") == (values.min(), 40.0)
    low, high = histogram.range_by("percentile")
    assert -4.5 < low < -3.5
    assert 3.5 < high < 4.5


def test_entropy_cuts_an_outlier_and_keeps_an_even_distribution() -> None:
    values = np.append(np.random.default_rng(0).standard_normal(100_000), 40.0).astype(np.float32)
    assert Histogram.of(values).range_by("entropy")[1] < 10
    even = np.linspace(0, 1, 100_000, dtype=np.float32)
    assert Histogram.of(even).range_by("entropy") == pytest.approx((0, 1), abs=0.01)


def test_zeros_of_a_relu_do_not_move_the_entropy_range() -> None:
    positive = np.abs(np.random.default_rng(0).standard_normal(50_000)).astype(np.float32)
    rectified = np.concatenate([positive, np.zeros(500_000, np.float32)])
    assert Histogram.of(rectified).range_by("entropy") == pytest.approx(
        (0, Histogram.of(positive).range_by("entropy")[1])
    )


@pytest.mark.parametrize("method", ["minmax", "entropy", "percentile"])
@pytest.mark.parametrize("value", [0.0, 3.0, -2.0, 1e-35])
def test_constant_tensor_has_a_range(method: str, value: float) -> None:
    assert Histogram.of(np.full(9, value, np.float32)).range_by(method) == pytest.approx((value, value), abs=1e-3)


def logarithm() -> onnx.ModelProto:
    """Return a graph [N, 2] -> log -> times two."""
    nodes = [helper.make_node("Log", ["x"], ["log"]), helper.make_node("Add", ["log", "log"], ["y"])]
    graph = helper.make_graph(
        nodes,
        "logarithm",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 2])],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_all_images_are_seen_whatever_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = np.exp(np.random.default_rng(0).uniform(-3, 3, (50, 2))).astype(np.float32)
    large = collect(logarithm(), ["log"], inputs, batch=None)["log"]
    monkeypatch.setattr(ranges, "CHUNK_BYTES", 24)  # three images
    small = collect(logarithm(), ["log"], inputs, batch=None)["log"]
    assert large.counts.sum() == small.counts.sum() == inputs.size
    assert (large.counts == small.counts).all()
    assert large.high == pytest.approx(np.log(inputs.max()))


def test_tensor_that_is_not_finite_is_named() -> None:
    with pytest.raises(PipelineError, match="cannot quantise: tensor log takes values that are not finite"):
        collect(logarithm(), ["log"], np.zeros((3, 2), np.float32), batch=None)
