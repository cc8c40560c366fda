"""Rewrites change no answer, not by a bit, and only what they are meant for."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from pipeline.compression.calibrate import open_graph
from pipeline.compression.layout import pool_globally, unroll_normalisation
from tests.pipeline.compression.static_graphs import BODY, answers, pixels, weights, write_network


def unrolled(source: Path) -> onnx.ModelProto:
    model = onnx.load(source)
    unroll_normalisation(model.graph)
    onnx.checker.check_model(model, full_check=True)
    return model


def test_unrolled_normalisation_gives_the_same_bits(tmp_path: Path) -> None:
    source = write_network(tmp_path / "float.onnx")
    onnx.save(unrolled(source), tmp_path / "unrolled.onnx")
    images = pixels(20)
    assert (answers(source, images) == answers(tmp_path / "unrolled.onnx", images)).all()


def test_grey_images_stay_apart_in_a_batch(tmp_path: Path) -> None:
    grey = {"mean": np.full((1, 1, 1, 1), 0.5, np.float32), "std": np.full((1, 1, 1, 1), 0.2, np.float32)}
    source = write_network(tmp_path / "float.onnx", changed={**grey, "w1": weights()["w1"][:, :1]})
    model = onnx.load(source)
    model.graph.input[0].type.tensor_type.shape.dim[3].dim_value = 1
    onnx.save(model, source)
    onnx.save(unrolled(source), tmp_path / "unrolled.onnx")
    images = pixels(20)[..., :1]
    together = open_graph((tmp_path / "unrolled.onnx").read_bytes()).run(None, {"images": images})[0]
    assert (together == answers(source, images)).all()


def test_constants_of_the_normalisation_cover_a_row(tmp_path: Path) -> None:
    model = unrolled(write_network(tmp_path / "float.onnx"))
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    order = [node.op_type for node in model.graph.node]
    assert order[:7] == ["Reshape", "Cast", "Div", "Sub", "Div", "Reshape", "Transpose"]
    sub = next(node for node in model.graph.node if node.op_type == "Sub")
    assert constants[sub.input[1]] == pytest.approx(np.tile([0.5, 0.4, 0.3], 12))


@pytest.mark.parametrize(
    "body",
    [
        BODY.replace("perm = [0, 3, 1, 2]", "perm = [0, 3, 2, 1]"),
        BODY.replace("d = Div(f, depth)", "d = Div(f, f)"),
        BODY.replace("f = Cast<to = 1>(t)", "u = Identity(t) f = Cast<to = 1>(u)"),
    ],
)
def test_other_beginnings_stay_as_they_are(tmp_path: Path, body: str) -> None:
    source = write_network(tmp_path / "float.onnx", body=body)
    assert unrolled(source) == onnx.load(source)


@pytest.mark.parametrize(
    ("mean", "kind"),
    [
        ("ReduceMean<axes = [2, 3]>(q)", "GlobalAveragePool"),
        ("ReduceMean<axes = [-1, -2]>(q)", "GlobalAveragePool"),
        ("ReduceMean<axes = [2, 3], keepdims = 0>(q)", "ReduceMean"),
        ("ReduceMean<axes = [1, 2]>(q)", "ReduceMean"),
    ],
)
def test_mean_over_height_and_width_becomes_pooling(tmp_path: Path, mean: str, kind: str) -> None:
    model = onnx.load(write_network(tmp_path / "float.onnx", body=BODY.replace("ReduceMean<axes = [2, 3]>(q)", mean)))
    pool_globally(model.graph)
    node = next(node for node in model.graph.node if node.output[0] == "m")
    assert (node.op_type, len(node.input)) == (kind, 1)


def test_mean_with_its_axes_in_a_tensor_becomes_pooling(tmp_path: Path) -> None:
    body = BODY.replace("ReduceMean<axes = [2, 3]>(q)", "ReduceMean(q, axes)")
    changed = {"axes": np.array([-1, -2])}
    source = write_network(tmp_path / "float.onnx", body=body, changed=changed, opset=18)
    model = onnx.load(source)
    pool_globally(model.graph)
    onnx.save(model, tmp_path / "pooled.onnx")
    assert not any(node.op_type == "ReduceMean" for node in model.graph.node)
    assert answers(tmp_path / "pooled.onnx", pixels(9)) == pytest.approx(answers(source, pixels(9)), abs=1e-6)
