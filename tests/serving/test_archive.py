"""What an archive must be before anything is started with it."""

import hashlib
import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from serving.archive import MANIFEST, verify_archive
from serving.errors import UserError
from tests.colour import colour_archive, colour_onnx


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return colour_archive(tmp_path_factory.mktemp("packed"), name="colour", version="1.2")


Contents = dict[str, bytes]


def repacked(archive: Path, folder: Path, change: Callable[[Contents], object]) -> Path:
    """Write the archive again with changed contents."""
    with zipfile.ZipFile(archive) as given:
        contents = {name: given.read(name) for name in given.namelist()}
    change(contents)
    path = folder / "changed.mar"
    with zipfile.ZipFile(path, "w") as target:
        for name, content in contents.items():
            target.writestr(name, content)
    return path


def edited(contents: Contents, path: str, **values: object) -> None:
    contents[path] = json.dumps(json.loads(contents[path]) | values).encode()


def handled_by(contents: Contents, handler: str) -> None:
    manifest = json.loads(contents[MANIFEST])
    edited(contents, MANIFEST, model=manifest["model"] | {"handler": handler})


def test_a_good_archive_says_what_it_serves(archive: Path) -> None:
    info = verify_archive(archive)
    assert (info.path, info.name, info.version) == (archive, "colour", "1.2")
    assert info.graph_digest == hashlib.sha256(colour_onnx()).hexdigest()
    assert info.digest == hashlib.sha256(archive.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda contents: contents.pop("package.json"), "package.json is missing: this is no archive of this project"),
        (lambda contents: contents.pop("MAR-INF/MANIFEST.json"), "MANIFEST.json is missing"),
        (lambda contents: contents.pop("model.onnx"), "model.onnx is missing"),
        (lambda contents: contents.update({"model.onnx": b"other"}), "model.onnx was changed"),
        (lambda contents: contents.update({"quartet_worker/numpy.so": b""}), "quartet_worker/numpy.so was added"),
        (lambda contents: contents.update({"../escape.py": b""}), "../escape.py was added"),
        (lambda contents: edited(contents, "package.json", schema=99), "schema 99, schema 1 is needed"),
        (lambda contents: edited(contents, "package.json", name="other"), "name different models"),
        (lambda contents: edited(contents, "package.json", version="9"), "name different models"),
        (lambda contents: edited(contents, "package.json", files={}), "does not list golden.json, model.onnx"),
        (
            lambda contents: handled_by(contents, "../x.py"),
            "names the handler '../x.py', which is none of the files in",
        ),
        (
            lambda contents: handled_by(contents, "image_classifier"),
            "names the handler 'image_classifier', which is none",
        ),
        (lambda contents: contents.update({MANIFEST: b"[]"}), "MANIFEST.json describes no model"),
        (lambda contents: edited(contents, MANIFEST, model=[]), "MANIFEST.json describes no model"),
        (lambda contents: contents.update({"package.json": b"{"}), "not a readable archive"),
    ],
)
def test_a_changed_archive_is_refused_on_one_line(
    archive: Path, tmp_path: Path, change: Callable[[Contents], object], message: str
) -> None:
    with pytest.raises(UserError) as caught:
        verify_archive(repacked(archive, tmp_path, change))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "make package" in str(caught.value)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_file_given_twice_is_refused(archive: Path, tmp_path: Path) -> None:
    path = repacked(archive, tmp_path, lambda _: None)
    with zipfile.ZipFile(path, "a") as target:
        target.writestr("quartet_entry.py", "import os")
    with pytest.raises(UserError, match=r"quartet_entry\.py was added"):
        verify_archive(path)


@pytest.mark.parametrize("keep", [0, 100, 0.5, -1])
def test_a_cut_archive_is_refused(archive: Path, tmp_path: Path, keep: float) -> None:
    data = archive.read_bytes()
    cut = tmp_path / "cut.mar"
    cut.write_bytes(data[: int(len(data) * keep) if 0 < keep < 1 else int(keep)])
    with pytest.raises(UserError, match="not a readable archive"):
        verify_archive(cut)


def test_a_flipped_bit_is_noticed(archive: Path, tmp_path: Path) -> None:
    data = bytearray(archive.read_bytes())
    data[data.index(b"probabilities")] ^= 1
    broken = tmp_path / "broken.mar"
    broken.write_bytes(data)
    with pytest.raises(UserError, match="not a readable archive"):
        verify_archive(broken)


def test_a_damaged_compressed_file_is_noticed(archive: Path, tmp_path: Path) -> None:
    path = tmp_path / "packed.mar"
    with zipfile.ZipFile(archive) as given, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as target:
        for name in given.namelist():
            target.writestr(name, given.read(name))
        start = target.getinfo("golden.json").header_offset + 30 + len("golden.json")
    assert verify_archive(path).name == "colour"
    data = bytearray(path.read_bytes())
    data[start : start + 40] = b"\xff" * 40
    path.write_bytes(data)
    with pytest.raises(UserError, match="not a readable archive"):
        verify_archive(path)


def test_a_missing_archive_names_the_command_that_builds_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no archive at .*gone.mar; build one with: make package"):
        verify_archive(tmp_path / "gone.mar")
