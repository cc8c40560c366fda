"""The archive: what is in it, that its bytes repeat, and what is refused before anything is written."""

import json
import os
import shutil
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from pipeline import package
from pipeline.artifact import sha256_file
from pipeline.errors import PipelineError
from pipeline.package import build_archive
from tests.colour import LABELS, SPEC, TOLERANCE, colour_archive, colour_onnx, golden_of

CODE = ["__init__", "contents", "cpu", "handler", "infer", "model", "preprocess", "protocol"]


def arguments(folder: Path, **changes: Any) -> dict[str, Any]:
    """Return good arguments, changed; the graph lies beside `folder`."""
    graph = colour_onnx()
    onnx = folder.parent / "chosen.onnx"
    onnx.write_bytes(graph)
    good = {
        "name": "colour",
        "version": "1.0",
        "onnx": onnx,
        "labels": LABELS,
        "preprocessing": SPEC,
        "golden": golden_of(graph, "red", "green"),
        "tolerance": TOLERANCE,
        "provenance": {"choose": "0123"},
    }
    return good | changes


@pytest.fixture
def out(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


def contents(archive: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(archive) as opened:
        return {name: opened.read(name) for name in opened.namelist()}


def test_an_archive_holds_graph_code_golden_images_and_the_list_of_all(out: Path) -> None:
    archive = build_archive(out, **arguments(out))
    found = contents(archive)
    assert archive == out / "colour.mar"
    assert list(found) == [
        "MAR-INF/MANIFEST.json",
        "golden.json",
        "model.onnx",
        "package.json",
        "quartet_entry.py",
        *(f"quartet_worker/{name}.py" for name in CODE),
    ]
    assert found["model.onnx"] == colour_onnx()
    listed = json.loads(found["package.json"])
    assert set(listed["files"]) == set(found) - {"MAR-INF/MANIFEST.json", "package.json"}
    assert (listed["name"], listed["version"], listed["labels"]) == ("colour", "1.0", LABELS)
    assert listed["preprocessing"] == SPEC.to_json()
    assert listed["provenance"] == {"choose": "0123"}
    assert [path.name for path in out.iterdir()] == ["colour.mar"]


def test_the_manifest_is_the_one_torchserve_reads_without_the_time(out: Path) -> None:
    manifest = json.loads(contents(build_archive(out, **arguments(out)))["MAR-INF/MANIFEST.json"])
    assert manifest["model"]["modelName"] == "colour"
    assert manifest["model"]["modelVersion"] == "1.0"
    assert manifest["model"]["handler"] == "quartet_entry.py"
    assert manifest["model"]["serializedFile"] == "model.onnx"
    assert "createdOn" not in manifest


def test_the_worker_imports_nothing_of_this_project_by_its_name(out: Path) -> None:
    for name, content in contents(build_archive(out, **arguments(out))).items():
        if name.endswith(".py"):
            lines = content.decode().splitlines()
            assert not [line for line in lines if line.split()[:1] in (["import"], ["from"]) and "serving" in line]


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    archives = []
    for number in (1, 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        time.sleep(1.1 * (number - 1))  # the archiver's time has whole seconds
        archives.append(colour_archive(folder))
    assert sha256_file(archives[0]) == sha256_file(archives[1])


def test_another_graph_gives_other_bytes_under_the_same_name(out: Path) -> None:
    first = sha256_file(colour_archive(out))
    second = sha256_file(colour_archive(out, scale=10.0))
    assert first != second
    assert [path.name for path in out.iterdir()] == ["colour.mar"]


def test_entries_have_plain_permissions_and_no_time(out: Path) -> None:
    with zipfile.ZipFile(build_archive(out, **arguments(out))) as opened:
        assert {entry.date_time for entry in opened.infolist()} == {(1980, 1, 1, 0, 0, 0)}
        assert {entry.external_attr >> 16 for entry in opened.infolist()} == {0o100644}
        assert {entry.compress_type for entry in opened.infolist()} == {zipfile.ZIP_STORED}


def test_the_archiver_deletes_no_folder_of_ours(out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = tmp_path / "shared"
    (shared / "colour").mkdir(parents=True)
    (shared / "colour" / "precious").write_text("")
    monkeypatch.setenv("TMPDIR", str(shared))
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    build_archive(out, **arguments(out))
    assert (shared / "colour" / "precious").exists()


@pytest.mark.parametrize("name", ["with space", "com,ma", "st*r", "[a]", "back\\slash", "end "])
def test_a_folder_of_any_name_will_do(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    assert len(contents(build_archive(folder, **arguments(folder)))) == len(CODE) + 5


def test_a_relative_folder_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("out").mkdir()
    archive = build_archive(Path("out"), **arguments(tmp_path / "out"))
    assert archive.resolve() == tmp_path / "out" / "colour.mar"


@pytest.mark.parametrize("field", ["name", "version"])
@pytest.mark.parametrize("value", ["my model/v1", "müller", "-x", "", "1.0 beta"])
def test_a_bad_name_is_refused_before_anything_is_written(out: Path, field: str, value: str) -> None:
    with pytest.raises(PipelineError, match=rf"package\.{field} = "):
        build_archive(out, **arguments(out, **{field: value}))
    assert list(out.iterdir()) == []


GOLDEN = golden_of(colour_onnx(), "red", "green")
IMAGE, ANSWER = GOLDEN[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"onnx": Path("gone.onnx")}, "there is no ONNX file gone.onnx"),
        ({"labels": ["a"] * 7}, "the 7 labels must be at least one and all different"),
        ({"labels": []}, "the 0 labels must be at least one and all different"),
        ({"labels": LABELS[:3]}, "golden image 0 has 7 probabilities for 3 labels"),
        ({"golden": []}, "at least one golden image is needed"),
        ({"golden": [GOLDEN[1], (IMAGE, [float("nan"), *ANSWER[1:]])]}, "golden image 1 with a non-finite probability"),
        ({"golden": [(IMAGE, ANSWER[::-1])]}, "would not start: golden image 0, alone, is answered wrongly"),
        ({"golden": [(b"no image", ANSWER)]}, "would not start: a golden image cannot be decoded"),
        ({"tolerance": 0.0}, "must lie between 0 and 1, not 0.0"),
        ({"tolerance": 1.0}, "must lie between 0 and 1, not 1.0"),
        ({"onnx": Path(__file__)}, "would not start: model.onnx cannot be opened"),
    ],
)
def test_what_could_not_be_served_is_refused_and_leaves_nothing(
    out: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(PipelineError) as caught:
        build_archive(out, **arguments(out, **changes))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list(out.iterdir()) == []


@pytest.mark.parametrize("kind", ["missing", "file"])
def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path, kind: str) -> None:
    target = tmp_path / kind
    if kind == "file":
        target.write_text("")
    with pytest.raises(PipelineError, match=f"{kind} is no folder that can be written to"):
        build_archive(target, **arguments(target))


def test_a_read_only_folder_is_named(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda _path, mode: mode != os.W_OK)  # root may write everywhere
    with pytest.raises(PipelineError, match="no folder that can be written to"):
        build_archive(out, **arguments(out))


def test_a_failing_archiver_is_one_line_and_leaves_the_old_archive(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = sha256_file(colour_archive(out))
    monkeypatch.setattr(package, "ENTRY", "missing/entry.py")
    monkeypatch.setattr(package, "_write_code", lambda folder: shutil.copytree(Path(__file__).parent, folder))
    with pytest.raises(PipelineError) as caught:
        build_archive(out, **arguments(out))
    assert str(caught.value).startswith("torch-model-archiver failed: ")
    assert "\n" not in str(caught.value)
    assert [path.name for path in out.iterdir()] == ["colour.mar"]
    assert sha256_file(out / "colour.mar") == before
