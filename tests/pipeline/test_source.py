"""The code that decides a key is what a stage computes with, and nothing else."""

from pathlib import Path

import pytest

from pipeline import source
from pipeline.chain import CHAIN
from pipeline.source import PLUMBING, ROOT, source_digest, source_files

FILES = {stage.name: source_files(stage.module) for stage in CHAIN}


@pytest.mark.parametrize(
    ("stage", "files"),
    [
        ("train", ["pipeline/training/loop.py", "pipeline/training/parallel.py", "pipeline/loader.py"]),
        ("train", ["pipeline/models.py", "serving/worker/preprocess.py"]),
        (
            "compress",
            ["pipeline/compression/prune.py", "pipeline/compression/quantize.py", "pipeline/training/loop.py"],
        ),
        ("export", ["pipeline/session.py", "serving/worker/model.py"]),
        ("choose", ["pipeline/measure.py", "pipeline/session.py"]),
        ("package", ["pipeline/names.py", "serving/worker/handler.py", "serving/worker/protocol.py"]),
    ],
)
def test_stage_depends_on_what_it_computes_with(stage: str, files: list[str]) -> None:
    assert set(files) <= set(FILES[stage])


@pytest.mark.parametrize(
    ("stage", "file"),
    [
        ("train", "serving/worker/handler.py"),
        ("train", "pipeline/export.py"),
        ("export", "pipeline/choose.py"),
        ("choose", "pipeline/models.py"),
    ],
)
def test_stage_does_not_depend_on_what_others_compute_with(stage: str, file: str) -> None:
    assert file not in FILES[stage]


def test_plumbing_is_there_and_in_no_key() -> None:
    assert all((ROOT / file).is_file() for file in PLUMBING)
    assert not PLUMBING & {file for files in FILES.values() for file in files}


def test_digest_changes_with_an_import_of_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "ROOT", tmp_path)
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "pipeline" / "a.py").write_text("from pipeline.b import b")
    (tmp_path / "pipeline" / "b.py").write_text("def f():\n    from pipeline import c")
    digests = set()
    for text in ("1", "2"):
        (tmp_path / "pipeline" / "c.py").write_text(text)
        digests.add(source_digest("pipeline.a"))
    assert len(digests) == 2
