"""The command line, in this process: help, and one line for each mistake."""

from pathlib import Path
from typing import Any

import pytest

import pipeline.__main__
from pipeline.__main__ import main
from pipeline.artifact import StageResult, publish
from tests.given import graph_text, write_graph
from tests.pipeline.rows import SIX, report


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pipeline.machine.gpu_names", list)


def test_help_lists_stages_and_fields(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    assert "| train    |" in printed
    assert "--compress.prune.ratio" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--recipe", "x"], "quartet: recipe 'x' not found"),
        (["train", "--nproc", "two"], "quartet: train.nproc = 'two'"),
        (["train", "--recipe", "imagefolder"], "quartet: data.root is not set"),
        (["train", "--train.device", "cuda"], "quartet: train.device = 'cuda', but there is no NVIDIA GPU"),
        (["train", "--package.name", "a b"], "quartet: package.name = 'a b' cannot be used"),
        (["verify", "--port", "80x"], "quartet: --port 80x is no port"),
        (["compress", "--onnx", "x.onnx"], "quartet: there is no ONNX file x.onnx; pass --onnx FILE"),
    ],
)
def test_mistake_is_one_line_on_stderr_with_status_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.err.splitlines()[-1].startswith(message)
    assert printed.out == ""


def test_graph_and_images_may_be_named_in_short(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    grey = write_graph(tmp_path, graph_text(shape="N, 1, 16, 16"), name="grey.onnx")
    assert main(["compress", "--recipe", "digits", "--onnx", str(grey), "--data", "photos"]) == 2
    assert capsys.readouterr().err.startswith("quartet: data.root = 'photos' is no folder")
    path = write_graph(tmp_path)
    assert main(["compress", "--onnx", str(path)]) == 2
    assert capsys.readouterr().err.startswith("quartet: data.root is not set")
    assert main(["compress", "--onnx", str(path), "--data", "photos"]) == 2
    assert capsys.readouterr().err.startswith("quartet: data.root = 'photos' is no folder")
    assert main(["train", "--onnx", str(path), "--data", "photos"]) == 2
    assert capsys.readouterr().err.startswith("quartet: there is no stage train for a recipe that names a finished")


def test_unknown_stage_lists_those_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["trian"])
    assert caught.value.code == 2
    assert "invalid choice: 'trian'" in capsys.readouterr().err


def test_choice_ends_with_the_path_of_its_page_and_programs_still_get_the_artifact(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts: dict[str, Any] = {"source": "", "config": {}, "parent": None, "versions": {}, "data": {}}
    made = publish(tmp_path, stage="choose", facts=facts, work=lambda _: StageResult(data={}, report=report(*SIX)))
    monkeypatch.setattr(pipeline.__main__, "materialize", lambda *_, **__: [made])
    assert main(["choose"]) == 0
    printed = capsys.readouterr()
    assert printed.err.splitlines()[-1] == f"Report: {made.path / 'report' / 'report.html'}"
    assert printed.out == f"{made.path}\n"
