"""What decides a stage's key, and what the chain does with an artifact that is there."""

from pathlib import Path
from typing import Any

import pytest

from pipeline import chain
from pipeline.artifact import StageResult
from pipeline.chain import CHAIN, STAGES, Stage, materialize, own_network, stages_until
from pipeline.config import load_recipe, section_facts
from pipeline.errors import PipelineError
from pipeline.stage import Context
from tests.given import write_graph

ran: list[str] = []


def first(context: Context) -> StageResult:
    """Stand in for a stage: `tests.pipeline.test_chain:first`."""
    ran.append("first")
    (context.out / "a.txt").write_text("a")
    return StageResult(data={})


def second(context: Context) -> StageResult:
    """Stand in for the next stage; reads what the first one made."""
    ran.append("second")
    (context.out / "b.txt").write_text(context.parent.file("a.txt").read_text() + "b")
    return StageResult(data={})


def stand_in(name: str, *sections: str) -> Stage:
    return Stage(name, f"{__name__}:{name}", sections, lambda recipe: {})


@pytest.fixture(autouse=True)
def two_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    ran.clear()
    monkeypatch.setattr(chain, "CHAIN", (stand_in("first", "data"), stand_in("second", "choose")))


def run(root: Path, *overrides: str, force: bool = False) -> list[Any]:
    return materialize("second", load_recipe("digits", overrides), root=root, force=force)


def test_provider_that_does_not_load_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(provider: str) -> None:
        raise PipelineError(f"no {provider}")

    monkeypatch.setattr("pipeline.session.require_provider", refuse)
    monkeypatch.setattr(chain, "CHAIN", (stand_in("first", "data"), stand_in("second", "export")))
    with pytest.raises(PipelineError, match="no cuda"):
        run(tmp_path, "--export.provider=cuda")
    assert ran == []
    run(tmp_path)
    assert ran == ["first", "second"]


def test_stages_run_in_order_and_once(tmp_path: Path) -> None:
    assert run(tmp_path)[-1].file("b.txt").read_text() == "ab"
    run(tmp_path)
    assert ran == ["first", "second"]


def test_section_that_a_stage_does_not_read_does_not_make_it_run(tmp_path: Path) -> None:
    run(tmp_path)
    run(tmp_path, "--choose.budget=1")
    assert ran == ["first", "second", "second"]


def test_change_upstream_makes_everything_after_it_run(tmp_path: Path) -> None:
    run(tmp_path)
    run(tmp_path, "--data.crop_padding=2")
    assert ran == ["first", "second", "first", "second"]


def test_change_of_the_code_makes_the_stage_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path)
    monkeypatch.setattr(chain, "source_digest", lambda module: "other code")
    run(tmp_path)
    assert ran == ["first", "second", "first", "second"]


def test_force_runs_the_asked_for_stage_only(tmp_path: Path) -> None:
    run(tmp_path)
    run(tmp_path, force=True)
    assert ran == ["first", "second", "second"]


def test_damaged_artifact_is_refused_and_not_used(tmp_path: Path) -> None:
    (run(tmp_path)[0].path / "a.txt").write_text("changed")
    with pytest.raises(PipelineError, match=r"a\.txt is missing or was changed; delete .* and run the stage again"):
        run(tmp_path)


def test_own_network_decides_the_key_by_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    digests = []
    for text in ("net = 1", "net = 2"):
        (tmp_path / "own_net.py").write_text(text)
        digests.append(own_network("own_net:net"))
    assert digests[0] != digests[1]
    assert own_network("resnet20") == {}
    with pytest.raises(PipelineError, match="there is no module 'nowhere' on PYTHONPATH"):
        own_network("nowhere:net")


def test_every_stage_names_a_function_that_exists() -> None:
    assert all(callable(stage.function) for stage in CHAIN)
    assert all(callable(stage.function) for stage in STAGES.values())
    assert list(STAGES) == ["train", "compress", "export", "choose", "package", "import"]


@pytest.mark.parametrize(
    ("target", "stages"),
    [
        ("import", ["import"]),
        ("export", ["import"]),
        ("compress", ["import", "choose"]),
        ("package", ["import", "choose", "package"]),
    ],
)
def test_finished_graph_takes_the_place_of_training(tmp_path: Path, target: str, stages: list[str]) -> None:
    recipe = load_recipe("onnx", ["--onnx.file", str(write_graph(tmp_path))])
    assert [stage.name for stage in stages_until(target, recipe)] == stages


def test_stage_that_a_recipe_does_not_go_through_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "CHAIN", CHAIN)
    with pytest.raises(
        PipelineError, match=r"no stage train for a recipe that names a finished ONNX file: it has import"
    ):
        stages_until("train", load_recipe("onnx", ["--onnx.file", str(write_graph(tmp_path))]))
    with pytest.raises(PipelineError, match=r"no stage import for a recipe that names no ONNX file; pass --onnx FILE"):
        stages_until("import", load_recipe("digits"))


def test_what_a_stage_wants_to_be_known_is_told_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(f"{__name__}.first", with_a_note)
    run(tmp_path)
    run(tmp_path)
    assert [line for line in capsys.readouterr().err.splitlines() if "note" in line] == ["first: a note"] * 2


def with_a_note(context: Context) -> StageResult:
    """Stand in for a stage that has something to say."""
    (context.out / "a.txt").write_text("a")
    return StageResult(data={}, report={"notes": ["a note"]})


def test_parent_that_was_made_anew_with_another_outcome_makes_the_next_stage_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path)
    monkeypatch.setattr(f"{__name__}.first", other_first)
    materialize("first", load_recipe("digits"), root=tmp_path, force=True)
    assert run(tmp_path)[-1].file("b.txt").read_text() == "otherb"


def other_first(context: Context) -> StageResult:
    """Stand in for a stage that measures: another outcome under the same key."""
    (context.out / "a.txt").write_text("other")
    return StageResult(data={})


def test_fewer_images_than_processes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "CHAIN", CHAIN)
    with pytest.raises(PipelineError, match=r"train\.batch_size = 2 is less than one image for each of 3 processes"):
        materialize("train", load_recipe("digits", ["--train.batch_size=2", "--train.nproc=3"]), root=tmp_path)


def test_processes_as_typed_and_as_resolved_are_the_same_work() -> None:
    typed, default = (load_recipe("digits", words) for words in (["--train.nproc=2", "--train.device=cpu"], []))
    assert section_facts(typed, ["train"]) == section_facts(default, ["train"])


def test_calibrated_graph_belongs_to_a_kind_of_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = load_recipe("digits")
    given = load_recipe("onnx", ["--onnx.file", str(write_graph(tmp_path)), "--data.root", str(tmp_path)])
    for name, recipe in (("export", trained), ("import", given)):
        here = STAGES[name].facts(recipe)
        with monkeypatch.context() as patch:
            patch.setattr(chain, "cpu_facts", lambda: {"name": "another", "flags": []})
            assert STAGES[name].facts(recipe) != here
