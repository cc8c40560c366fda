"""What decides a stage's key, and what the chain does with an artifact that is there."""

from pathlib import Path
from typing import Any

import pytest

from pipeline import chain
from pipeline.artifact import StageResult
from pipeline.chain import CHAIN, ROOT, STAGES, Stage, materialize, own_network, source_digest
from pipeline.config import load_recipe
from pipeline.errors import PipelineError
from pipeline.stage import Context

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
    return Stage(name, f"{__name__}:{name}", sections, ("pipeline/errors.py",), lambda recipe: {})


@pytest.fixture(autouse=True)
def two_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    ran.clear()
    monkeypatch.setattr(chain, "CHAIN", (stand_in("first", "data"), stand_in("second", "choose")))


def run(root: Path, *overrides: str, force: bool = False) -> list[Any]:
    return materialize("second", load_recipe("digits", overrides), root=root, force=force)


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
    monkeypatch.setattr(chain, "source_digest", lambda sources: "other code")
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


def test_source_digest_covers_names_and_contents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "ROOT", tmp_path)
    (tmp_path / "code").mkdir()
    file = tmp_path / "code" / "a.py"
    digests = set()
    for name, text in (("a.py", "1"), ("a.py", "2"), ("b.py", "2")):
        file = file.rename(file.with_name(name)) if file.exists() else file
        file.write_text(text)
        digests.add(source_digest(["code"]))
    assert len(digests) == 3


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


def test_every_stage_names_a_function_and_sources_that_exist() -> None:
    for stage in CHAIN:
        assert all((ROOT / source).exists() for source in stage.sources)
        assert (ROOT / (stage.run.partition(":")[0].replace(".", "/") + ".py")).exists()
    assert list(STAGES) == ["train", "compress", "export", "choose", "package"]


def test_code_that_a_stage_imports_decides_its_key() -> None:
    """A stage's own module is among the sources that its key covers."""
    for stage in CHAIN:
        module = stage.run.partition(":")[0].replace(".", "/") + ".py"
        assert any(module == source or module.startswith(f"{source}/") for source in stage.sources)
