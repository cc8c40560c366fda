"""What int8 gains is measured on the graph that is exported, once for each shape, and kept whole whatever happens."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from pipeline.compression import gains
from pipeline.compression.gains import float_graph, int8_graph, measured_gains
from pipeline.compression.layers import Shape
from pipeline.compression.quantize import RowwiseInt8Linear
from tests.pipeline.compression.graphs import exported

SMALL, LARGE = Shape(8, 8, 1), Shape(64, 64, 4)


class Clock:
    """Stands in for the measurement: the first gain is 1, the next 2, and so on."""

    def __init__(self, *, fails_at: Shape | None = None) -> None:
        self.asked: list[Shape] = []
        self.fails_at = fails_at

    def __call__(self, shape: Shape, *, bits: int, folder: Path) -> float:
        if shape == self.fails_at:
            raise KeyboardInterrupt
        self.asked.append(shape)
        return float(len(self.asked))


def use(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(gains, "measure", clock)
    return clock


def test_shape_is_measured_once_and_then_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = use(Clock(), monkeypatch)
    first = measured_gains([LARGE, SMALL], bits=7, cache=tmp_path)
    assert measured_gains([SMALL, LARGE], bits=7, cache=tmp_path) == first == {SMALL: 1.0, LARGE: 2.0}
    assert clock.asked == [SMALL, LARGE]


def test_other_bits_are_measured_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = use(Clock(), monkeypatch)
    for bits in (7, 8):
        measured_gains([SMALL], bits=bits, cache=tmp_path)
    assert clock.asked == [SMALL, SMALL]


def test_what_was_measured_before_a_kill_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(Clock(fails_at=LARGE), monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        measured_gains([SMALL, LARGE], bits=7, cache=tmp_path)
    clock = use(Clock(), monkeypatch)
    assert measured_gains([SMALL, LARGE], bits=7, cache=tmp_path) == {SMALL: 1.0, LARGE: 1.0}
    assert clock.asked == [LARGE]


def test_cache_says_under_what_conditions_it_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(Clock(), monkeypatch)
    measured_gains([SMALL], bits=7, cache=tmp_path)
    (path,) = tmp_path.glob("gains-*.json")
    kept = json.loads(path.read_text())
    assert kept["gains"] == {"1x8x8": 1.0}
    assert sorted(kept) == ["bits", "cpu", "gains", "onnxruntime", "source"]


def test_measured_graphs_are_those_that_the_exporter_makes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(16, 8)
    weight = linear.weight.detach().numpy()
    for layer, graph in ((linear, float_graph(weight)), (RowwiseInt8Linear(16, 8, bits=7), int8_graph(weight, bits=7))):
        exported(layer, (16,), tmp_path / "layer.onnx")
        nodes = onnx.load(tmp_path / "layer.onnx").graph.node
        assert [node.op_type for node in nodes] == [node.op_type for node in graph.graph.node]


def test_measured_int8_graph_computes_what_the_layer_does() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(16, 8, bias=False)
    graph = int8_graph(linear.weight.detach().numpy(), bits=7)
    x = torch.randn(5, 16)
    found = onnx_answer(graph, x.numpy())
    assert np.array_equal(found, RowwiseInt8Linear.from_linear(linear, bits=7)(x).numpy())


def onnx_answer(graph: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    import onnxruntime

    session = onnxruntime.InferenceSession(graph.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": x})[0])


def test_measurement_leaves_nothing_but_a_ratio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gains, "ROUNDS", 3)
    assert 0 < gains.measure(SMALL, bits=7, folder=tmp_path) < 100
    assert list(tmp_path.iterdir()) == []
