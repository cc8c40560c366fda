"""Static int8 is fast where it can be, says what it did, keeps within its budget, or names why it cannot."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from pipeline.compression.bits import weight_bits
from pipeline.compression.calibrate import Judge, Static, answers_of, open_graph, quantize_static, spread
from pipeline.errors import PipelineError
from tests.pipeline.compression.static_graphs import BODY, Validation, answers, pixels, weights, write_network

METHODS = ("minmax", "entropy", "percentile")


def quantized(source: Path, out: Path, **options: Any) -> Static:
    """Quantize with 7 bits; the right answers are the float graph's."""
    held_out = pixels(96, seed=1)
    chosen: dict[str, Any] = {
        "images": pixels(64),
        "labels": answers(source, held_out).argmax(1),
        "methods": METHODS,
        "max_loss": 3.0,
        "bits": 7,
    }
    return quantize_static(source, out, validation=Validation(held_out), **(chosen | options))


@pytest.fixture
def network(tmp_path: Path) -> Path:
    return write_network(tmp_path / "float.onnx")


def outlier(scale: float) -> dict[str, NDArray[Any]]:
    """Return weights with which one channel between the convolutions is `scale` times larger, for the same answers."""
    constants = weights()
    constants["w1"][0] *= scale
    constants["b1"][0] *= scale
    constants["w2"][:, 0] /= scale
    return {name: constants[name] for name in ("w1", "b1", "w2")}


# Nothing but the second convolution reads the first, and there is a third.
THREE = BODY.replace("q = Relu(e)", "u = Relu(e) q = Conv(u, w4)").replace("e = Add(c, r)", "e = Identity(c)")


def test_everything_between_pixels_and_logits_is_int8(network: Path, tmp_path: Path) -> None:
    static = quantized(network, tmp_path / "int8.onnx")
    for kind, count in {"QLinearConv": 2, "QLinearAdd": 1, "QLinearGlobalAveragePool": 1, "QGemm": 1}.items():
        assert static.operators[kind] == count
    assert static.operators["QuantizeLinear"] == 1  # of the normalised pixels: no tensor goes back to float
    assert not static.operators.keys() & {"Conv", "Relu", "Add", "DequantizeLinear", "Gemm"}
    assert (static.layers, static.given_back, static.notes[:-1]) == (3, (), ())


def test_answers_are_the_float_graphs_but_for_rounding(network: Path, tmp_path: Path) -> None:
    static = quantized(network, tmp_path / "int8.onnx")
    images = pixels(50, seed=2)
    difference = np.abs(answers(network, images) - answers(tmp_path / "int8.onnx", images))
    assert 0 < difference.mean() < 0.02
    assert (static.float_top1, static.unsaturated) == (1, 1)
    assert static.trial.agreement == static.trial.top1 >= 0.97


def test_best_method_is_kept(network: Path, tmp_path: Path) -> None:
    static = quantized(network, tmp_path / "int8.onnx")
    assert [trial.method for trial in static.trials] == list(METHODS)
    assert static.trial == max(static.trials, key=lambda trial: (trial.top1, trial.agreement, -trial.error))


def test_calibration_has_an_effect(network: Path, tmp_path: Path) -> None:
    assert quantized(network, tmp_path / "int8.onnx").trial.top1 > 0.95
    dark = quantized(network, tmp_path / "dark.onnx", images=np.zeros((4, 12, 12, 3), np.uint8), max_loss=100)
    assert dark.trial.top1 < 0.5


def test_second_run_gives_the_same_bytes_and_leaves_the_source_alone(network: Path, tmp_path: Path) -> None:
    before = network.read_bytes()
    quantized(network, tmp_path / "one.onnx")
    quantized(network, tmp_path / "two.onnx")
    assert (tmp_path / "one.onnx").read_bytes() == (tmp_path / "two.onnx").read_bytes()
    assert network.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["float.onnx", "one.onnx", "two.onnx"]


def test_flags_are_in_the_graph(network: Path, tmp_path: Path) -> None:
    static = quantized(network, tmp_path / "int8.onnx", metadata={"candidate": "static"})
    metadata = {entry.key: entry.value for entry in onnx.load(tmp_path / "int8.onnx").metadata_props}
    assert metadata == static.facts | {"candidate": "static"}
    assert static.facts["static_weight_bits"] == "7"
    assert static.facts["static_reduce_range"] == "true"
    assert static.facts["static_method"] == static.trial.method


def test_answers_do_not_depend_on_batch_mates(network: Path, tmp_path: Path) -> None:
    quantized(network, tmp_path / "int8.onnx")
    images = pixels(8, seed=3)
    session = open_graph(str(tmp_path / "int8.onnx"))
    assert (answers_of(session, [images]) == answers_of(session, [image[None] for image in images])).all()


def test_layers_that_hurt_are_given_back_and_named(tmp_path: Path) -> None:
    changed = outlier(300) | {"w4": np.eye(8, dtype=np.float32).reshape(8, 8, 1, 1)}
    source = write_network(tmp_path / "float.onnx", changed=changed, body=THREE)
    static = quantized(source, tmp_path / "int8.onnx")
    assert max(trial.top1 for trial in static.trials) < 0.9
    assert [loss.error > 0.1 for loss in static.given_back] == [True, True]  # both sides of the uneven tensor
    assert static.trial.top1 >= 0.97
    assert static.facts["static_float_layers"].split() == [loss.layer for loss in static.given_back]
    assert (static.layers, static.operators["Conv"], static.operators["QLinearConv"]) == (2, 2, 1)
    assert any(note.startswith("int8.onnx: 2 layers stay float32 for their error") for note in static.notes)


def test_depthwise_layer_with_one_channel_far_above_the_others_does_not_take_the_accuracy_with_it(
    tmp_path: Path,
) -> None:
    """All channels of a tensor share one scale: beside one that is 300 times larger, the others would round to 0."""
    draw = np.random.default_rng(3).standard_normal
    depthwise, pointwise = draw((8, 1, 3, 3)).astype(np.float32), (draw((8, 8, 1, 1)) / 2).astype(np.float32)
    depthwise[0] *= 300
    pointwise[:, 0] /= 300
    body = BODY.replace(
        "c = Conv<pads = [1, 1, 1, 1]>(r, w2, b2)",
        "v2 = Conv<pads = [1, 1, 1, 1], group = 8>(r, w2) c = Conv(v2, w4)",
    )
    source = write_network(tmp_path / "float.onnx", changed={"w2": depthwise, "w4": pointwise}, body=body)
    static = quantized(source, tmp_path / "int8.onnx")
    assert max(trial.top1 for trial in static.trials) < 0.97  # three points are allowed
    assert static.trial.top1 >= 0.97
    assert static.given_back
    held_out = pixels(96, seed=1)
    same = answers(source, held_out).argmax(1) == answers(tmp_path / "int8.onnx", held_out).argmax(1)
    assert same.mean() == pytest.approx(static.trial.top1)


def test_graph_that_int8_cannot_hold_is_refused_with_the_worst_layers(tmp_path: Path) -> None:
    source = write_network(tmp_path / "float.onnx")
    wrong = (answers(source, pixels(96, seed=1)).argmax(1) + 1) % 4
    with pytest.raises(PipelineError, match=r"int8 loses -?\d.* points, -200 are allowed.* worst: \S+ \("):
        quantized(source, tmp_path / "int8.onnx", labels=wrong, max_loss=-200.0)


def test_eight_bits_are_kept_only_where_sums_cannot_saturate(tmp_path: Path) -> None:
    full = {name: np.sign(weights()[name]).astype(np.float32) / 4 for name in ("w1", "w2")}
    source = write_network(tmp_path / "float.onnx", changed=full)
    static = quantized(source, tmp_path / "int8.onnx", bits=8, max_loss=100.0)
    assert static.bits == weight_bits("auto")
    assert static.unsaturated >= 0.999
    assert any("sums of 8-bit weights saturate" in note for note in static.notes) == (static.bits == 7)


def test_graph_that_always_saturates_is_refused(network: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Judge, "unsaturated", lambda self, model: 0.5)
    with pytest.raises(PipelineError, match=r"no int8 graph: sums of 7-bit weights saturate .* only 50\.00%"):
        quantized(network, tmp_path / "int8.onnx")
    assert not (tmp_path / "int8.onnx").exists()


def test_small_gain_in_bytes_is_said(tmp_path: Path) -> None:
    static = quantized(write_network(tmp_path / "float.onnx"), tmp_path / "int8.onnx")
    assert static.ratio == pytest.approx(
        (tmp_path / "float.onnx").stat().st_size / (tmp_path / "int8.onnx").stat().st_size
    )
    assert static.ratio < 1.5
    assert static.notes[-1] == f"int8.onnx is only {static.ratio:.2f}x smaller than the float graph"


def test_weights_beside_the_graph_are_counted_and_come_inside(network: Path, tmp_path: Path) -> None:
    (tmp_path / "split").mkdir()
    source = tmp_path / "split" / "float.onnx"
    onnx.save(onnx.load(network), source, save_as_external_data=True, location="float.data", size_threshold=100)
    static = quantized(source, tmp_path / "int8.onnx")
    beside = (tmp_path / "split" / "float.data").stat().st_size
    assert static.ratio * (tmp_path / "int8.onnx").stat().st_size == pytest.approx(source.stat().st_size + beside)
    assert sorted(path.name for path in (tmp_path / "split").iterdir()) == ["float.data", "float.onnx"]


def test_calibration_images_are_spread_over_classes_and_positions() -> None:
    labels = np.array([0] * 90 + [1] * 8 + [2] * 2)
    positions = spread(labels, 12)
    assert len(set(positions.tolist())) == 10  # four of each class, but one has two images only
    assert np.bincount(labels[positions]).tolist() == [4, 4, 2]
    assert positions.tolist() == [0, 22, 45, 67, 90, 92, 94, 96, 98, 99]
    assert np.bincount(labels[spread(labels, 1000)]).tolist() == [90, 8, 2]
