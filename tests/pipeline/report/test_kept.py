"""The file says which layers stayed float32; the reports of compress and export say why, where they are there."""

from pathlib import Path
from typing import Any

from pipeline.artifact import StageResult, publish
from pipeline.report.kept import kept_in_float, reports_behind
from tests.pipeline.test_graph import convolutional, int8

GAINS = {
    "int8_layers": {
        "dynamic": [
            {"layer": "fc", "gain": 1.01, "int8": False, "reason": "1.01x, 1.05x is asked for"},
            {"layer": "conv2", "gain": None, "int8": False, "reason": "its input is the same for every image"},
            {"layer": "conv1", "gain": 2.0, "int8": True, "reason": "2.00x, 1.05x is asked for"},
        ]
    }
}
GIVEN_BACK = {"static": {"static": {"given_back": [{"layer": "node_conv_2", "error": 0.1}]}}}


def test_float_candidate_keeps_everything_so_nothing_is_listed(tmp_path: Path) -> None:
    assert kept_in_float("pruned", convolutional(tmp_path / "g.onnx", width=16), [GAINS]) == []


def test_int8_candidate_without_float_weights_has_nothing_to_explain(tmp_path: Path) -> None:
    assert kept_in_float("dynamic", int8(tmp_path / "g.onnx"), [GAINS]) == []


def test_reasons_come_from_the_reports_and_layers_with_the_same_reason_are_together(tmp_path: Path) -> None:
    path = convolutional(tmp_path / "g.onnx", width=16)
    assert kept_in_float("dynamic", path, [{}, GAINS]) == [
        {"reason": "dynamic int8 is for linear layers", "layers": ["conv1"]},
        {"reason": "its input is the same for every image", "layers": ["conv2"]},
        {"reason": "int8 would gain too little: 1.01x, 1.05x is asked for", "layers": ["fc"]},
    ]
    assert kept_in_float("static", path, [GIVEN_BACK])[1] == {
        "reason": "given back by static int8: alone it changes an answer by more than the others",
        "layers": ["conv2"],
    }


def test_layers_are_listed_where_no_report_is_left(tmp_path: Path) -> None:
    path = convolutional(tmp_path / "g.onnx", width=16)
    assert kept_in_float("dynamic", path, []) == [
        {"reason": "dynamic int8 is for linear layers", "layers": ["conv1", "conv2", "fc"]}
    ]


def test_reports_of_all_earlier_stages_are_found_while_they_are_there(tmp_path: Path) -> None:
    def made(stage: str, parent: str | None) -> Any:
        facts: dict[str, Any] = {"source": stage, "config": {}, "parent": parent, "versions": {}, "data": {}}
        return publish(tmp_path, stage=stage, facts=facts, work=lambda _: StageResult(data={}, report={"of": stage}))

    train = made("train", None)
    compress = made("compress", train.manifest.key)
    export = made("export", compress.manifest.key)
    assert [r["of"] for r in reports_behind(export)] == ["export", "compress", "train"]
    compress.path.rename(tmp_path / "elsewhere")
    assert [r["of"] for r in reports_behind(export)] == ["export"]
