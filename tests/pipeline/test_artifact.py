"""Artifacts are published whole or not at all, and nothing that was changed is read."""

from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from pipeline.artifact import StageResult, artifact_path, exclusive, key_of, load_artifact, publish, resume_path
from pipeline.errors import PipelineError

FACTS: dict[str, Any] = {"stage": "s", "source": "c0de", "config": {"a": 1}, "parent": None, "versions": {}, "data": {}}


def write_weights(out: Path) -> StageResult:
    (out / "weights").write_bytes(b"abc")
    (out / "report").mkdir()
    (out / "report" / "plot.png").write_bytes(b"measured")
    return StageResult(data={"labels": ["x"]}, metrics={"top1": 0.5}, report={"cost_ms": 1.5})


def test_published_artifact_is_read_back_with_its_files_and_report(tmp_path: Path) -> None:
    made = publish(tmp_path, stage="s", facts=FACTS, work=write_weights)
    read = load_artifact(made.path)
    assert read.file("weights").read_bytes() == b"abc"
    assert read.manifest.metrics == {"top1": 0.5}
    assert read.report == {"cost_ms": 1.5}
    assert [path.name for path in (tmp_path / "s").iterdir()] == [made.path.name]


def test_manifest_lists_no_file_that_holds_measurements(tmp_path: Path) -> None:
    assert list(publish(tmp_path, stage="s", facts=FACTS, work=write_weights).manifest.files) == ["weights"]


def test_interrupted_stage_leaves_no_artifact(tmp_path: Path) -> None:
    def dies(out: Path) -> StageResult:
        (out / "weights").write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        publish(tmp_path, stage="s", facts=FACTS, work=dies)
    assert not artifact_path(tmp_path, "s", key_of(FACTS)).exists()
    assert list((tmp_path / "s").iterdir()) == []


def test_what_an_interrupted_run_left_does_not_reach_the_next_one(tmp_path: Path) -> None:
    partial = artifact_path(tmp_path, "s", key_of(FACTS)).with_name(key_of(FACTS)[:16] + ".partial")
    partial.mkdir(parents=True)
    (partial / "debris").write_text("half")
    assert list(publish(tmp_path, stage="s", facts=FACTS, work=write_weights).manifest.files) == ["weights"]


def test_publishing_ends_the_resume_folder(tmp_path: Path) -> None:
    resume = resume_path(tmp_path, "s", key_of(FACTS))
    resume.mkdir(parents=True)
    publish(tmp_path, stage="s", facts=FACTS, work=write_weights)
    assert not resume.exists()


def test_same_work_gives_the_same_digest(tmp_path: Path) -> None:
    digests = [publish(tmp_path / name, stage="s", facts=FACTS, work=write_weights).digest for name in "ab"]
    assert digests[0] == digests[1]


@pytest.mark.parametrize("fact", ["source", "config", "parent", "versions", "data"])
def test_key_depends_on_every_fact(fact: str) -> None:
    assert key_of(FACTS | {fact: "other"}) != key_of(FACTS)


def test_artifact_that_is_made_anew_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    def other(out: Path) -> StageResult:
        (out / "weights").write_bytes(b"new")
        assert load_artifact(first.path).file("weights").read_bytes() == b"abc"
        return StageResult(data={})

    first = publish(tmp_path, stage="s", facts=FACTS, work=write_weights)
    assert publish(tmp_path, stage="s", facts=FACTS, work=other).file("weights").read_bytes() == b"new"
    assert [path.name for path in (tmp_path / "s").iterdir()] == [first.path.name]


@pytest.mark.parametrize("damage", ["change", "remove"])
def test_changed_file_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    made = publish(tmp_path, stage="s", facts=FACTS, work=write_weights)
    weights = made.path / "weights"
    weights.write_bytes(b"abd") if damage == "change" else weights.unlink()
    with pytest.raises(PipelineError, match="weights is missing or was changed"):
        load_artifact(made.path)


def test_second_run_says_that_it_waits_and_goes_on_when_the_first_has_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    order: list[str] = []

    def late() -> None:
        with exclusive(tmp_path / "s" / "key.lock"):
            order.append("second")

    with exclusive(tmp_path / "s" / "key.lock"):
        second = Thread(target=late)
        second.start()
        second.join(timeout=0.3)
        order.append("first")
    second.join()
    assert order == ["first", "second"]
    assert capsys.readouterr().err == "waiting for another run that works on s/key\n"


def test_directory_without_manifest_is_no_artifact(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match=r"manifest\.json is missing; delete .* and run the stage again"):
        load_artifact(tmp_path)


def test_manifest_that_was_cut_off_is_named(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"schema_version": 1, ')
    with pytest.raises(PipelineError, match=r"manifest\.json is damaged; delete .* and run the stage again"):
        load_artifact(tmp_path)


def test_file_that_the_manifest_does_not_list_cannot_be_asked_for(tmp_path: Path) -> None:
    made = publish(tmp_path, stage="s", facts=FACTS, work=write_weights)
    with pytest.raises(PipelineError, match=r"has no file 'model\.onnx'"):
        made.file("model.onnx")
