"""The installation: what it refuses, when it has nothing to do, and what an interruption leaves."""

import ast
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from pipeline import install
from pipeline.install import Machine, describe, is_installed, refusal

GOOD = Machine(
    system="Linux",
    machine="x86_64",
    libc=("glibc", "2.36"),
    python=(3, 12),
    executable="/usr/bin/python3",
    missing_modules=(),
    free_gb=50.0,
    needed_gb=10.3,
    other_pythons=("python3.13",),
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a project folder with pins and an environment that is complete but for its stamp."""
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    (tmp_path / "pipeline/constraints.txt").write_text("torch==1\n")
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").symlink_to(sys.executable)
    (tmp_path / ".venv/pyvenv.cfg").touch()
    return tmp_path


@pytest.fixture
def pip_calls(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Replace venv and pip by a list of what was asked of them; venv makes a folder with a Python in it."""
    calls: list[list[str]] = []

    def run(command: list[str], *, check: bool) -> None:
        calls.append(command)
        (Path(command[-1]) / "bin").mkdir(exist_ok=True)
        (Path(command[-1]) / "bin/python").symlink_to(sys.executable)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(install, "_pip_install", lambda python, **_: calls.append([str(python), "pip"]))
    return calls


def test_good_machine_is_not_refused() -> None:
    assert refusal(GOOD) is None


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"system": "Darwin", "machine": "arm64"}, "Quartet runs on Linux x86_64; this is Darwin arm64"),
        ({"machine": "aarch64"}, "Quartet runs on Linux x86_64; this is Linux aarch64"),
        ({"libc": ("", "")}, "Quartet's wheels need glibc 2.28 or newer; this system has another C library"),
        ({"libc": ("glibc", "2.17")}, "Quartet's wheels need glibc 2.28 or newer; this system has glibc 2.17"),
        (
            {"python": (3, 10)},
            "Quartet needs Python 3.11, 3.12 or 3.13; this is 3.10 (/usr/bin/python3); use: make PYTHON=python3.13",
        ),
        (
            {"python": (3, 14), "other_pythons": ()},
            "Quartet needs Python 3.11, 3.12 or 3.13; this is 3.14 (/usr/bin/python3); "
            "use: make PYTHON=/path/to/python3.11",
        ),
        (
            {"missing_modules": ("venv", "ensurepip")},
            "/usr/bin/python3 has no module venv and ensurepip; "
            "on Debian or Ubuntu: sudo apt-get install python3.12-venv",
        ),
        ({"free_gb": 3.21}, "the installation needs 10.3 GB of disk; 3.2 GB are free"),
    ],
)
def test_machine_that_will_not_do_is_refused_in_one_line(change: dict[str, Any], line: str) -> None:
    assert refusal(GOOD._replace(**change)) == line


def test_refusal_is_printed_and_exits_with_two(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(install, "inspect_machine", lambda _: GOOD._replace(free_gb=1.0))
    assert install.main(tree / ".venv") == 2
    assert capsys.readouterr().err == "the installation needs 10.3 GB of disk; 1.0 GB are free\n"


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_what_is_no_environment_is_refused_and_left_alone(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place, precious = tmp_path / "photos", tmp_path / "photos"
    if kind == "folder":
        place.mkdir()
        precious = place / "holiday.jpg"
    precious.write_text("precious")
    monkeypatch.setattr(install, "inspect_machine", lambda _: GOOD)
    monkeypatch.setattr(install, "install", lambda venv: pytest.fail(f"installs into {venv}"))
    assert install.main(place) == 2
    line = f"VENV={place} is there and is no Python environment; name another folder, a new or an empty one\n"
    assert capsys.readouterr().err == line
    assert precious.read_text() == "precious"


@pytest.mark.parametrize("mark", ["pyvenv.cfg", install.STAMP, install.UNFINISHED])
def test_environment_and_a_half_made_one_are_not_refused(mark: str, tmp_path: Path) -> None:
    (tmp_path / mark).touch()
    (tmp_path / "lib").mkdir()
    assert install.occupied(tmp_path) is None


def test_new_or_empty_folder_is_not_refused(tmp_path: Path) -> None:
    assert install.occupied(tmp_path) is None
    assert install.occupied(tmp_path / "new") is None


def test_this_machine_is_described_truly(tmp_path: Path) -> None:
    machine = install.inspect_machine(tmp_path / "not" / "there" / ".venv")
    assert machine.python == sys.version_info[:2]
    assert machine.missing_modules == ()
    assert machine.needed_gb >= install.INSTALLED_GB + install.DOWNLOAD_GB
    assert refusal(machine._replace(free_gb=1000.0)) is None


def test_unchanged_pins_install_nothing(tree: Path, pip_calls: list[list[str]]) -> None:
    venv = tree / ".venv"
    install.install(venv, root=tree)
    assert is_installed(venv, root=tree)
    assert pip_calls == [[str(venv / "bin/python"), "pip"]]
    (tree / "pyproject.toml").touch()  # as a checkout does
    assert is_installed(venv, root=tree)


@pytest.mark.parametrize("name", install.INPUTS)
def test_changed_pins_install_again_into_the_same_environment(
    name: str, tree: Path, pip_calls: list[list[str]]
) -> None:
    venv = tree / ".venv"
    install.install(venv, root=tree)
    (venv / "kept").touch()
    (tree / name).write_text("changed")
    assert not is_installed(venv, root=tree)
    install.install(venv, root=tree)
    assert is_installed(venv, root=tree)
    assert (venv / "kept").exists()


def test_first_installation_that_was_cut_off_starts_again(
    tree: Path, pip_calls: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    venv = tree / "new"

    def killed(python: Path, **_: object) -> None:
        (venv / "half-unpacked").touch()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(install, "_pip_install", killed)
        with pytest.raises(KeyboardInterrupt):
            install.install(venv, root=tree)
    assert not is_installed(venv, root=tree)
    install.install(venv, root=tree)
    assert is_installed(venv, root=tree)
    assert not (venv / "half-unpacked").exists()


def test_update_that_was_cut_off_does_not_pass_for_the_old_pins(
    tree: Path, pip_calls: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    venv, pins = tree / ".venv", tree / "pyproject.toml"
    install.install(venv, root=tree)
    old = pins.read_text()
    pins.write_text("changed")

    def killed(python: Path, **_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(install, "_pip_install", killed)
    with pytest.raises(KeyboardInterrupt):
        install.install(venv, root=tree)
    pins.write_text(old)
    assert not is_installed(venv, root=tree)


def test_moved_environment_is_made_anew(tree: Path, pip_calls: list[list[str]]) -> None:
    install.install(tree / ".venv", root=tree)
    (tree / ".venv").rename(tree / "moved")
    assert not is_installed(tree / "moved", root=tree)
    install.install(tree / "moved", root=tree)
    assert pip_calls[1:] == [
        [sys.executable, "-m", "venv", str(tree / "moved")],
        [str(tree / "moved/bin/python"), "pip"],
    ]


def test_environment_whose_python_went_away_is_not_installed(tree: Path, pip_calls: list[list[str]]) -> None:
    install.install(tree / ".venv", root=tree)
    (tree / ".venv/bin/python").unlink()
    (tree / ".venv/bin/python").symlink_to("/nowhere/python3")
    assert not is_installed(tree / ".venv", root=tree)


def test_failed_pip_is_one_line_and_leaves_no_stamp(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tree / ".venv/bin/python").unlink()
    (tree / ".venv/bin/python").symlink_to("/bin/false")
    monkeypatch.setattr(install, "ROOT", tree)
    monkeypatch.setattr(install, "inspect_machine", lambda _: GOOD)
    assert install.main(tree / ".venv") == 2
    announced, failed = capsys.readouterr().err.splitlines()
    assert announced.startswith(f"Installing the pinned dependencies into {tree / '.venv'}: about 7.0 GB")
    assert failed.startswith("the installation failed (")
    assert not (tree / ".venv" / install.STAMP).exists()


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("  Downloading torch-2.14.1-cp311-cp311-manylinux_2_28_x86_64.whl (530.6 MB)\n", "torch 2.14.1 (530.6 MB)"),
        ("  Using cached idna-3.20-py3-none-any.whl (70 kB)\n", "idna 3.20 (70 kB)"),
        ("  Downloading idna-3.20-py3-none-any.whl.metadata (7 kB)\n", ""),
        ("Requirement already satisfied: torch==2.14.1 in ./.venv\n", ""),
        ("Installing collected packages: a, b, c\n", "unpacking 3 packages"),
    ],
)
def test_pip_is_reported_by_what_it_fetches(line: str, shown: str) -> None:
    assert describe(line) == shown


def pinned() -> dict[str, str]:
    """Return name and version of every line of the constraints, names in their normal form."""
    lines = (install.ROOT / "pipeline/constraints.txt").read_text().splitlines()
    pins = [line.split("==") for line in lines if not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pins}


def required(name: str, extras: frozenset[str], seen: set[tuple[str, frozenset[str]]]) -> None:
    """Add to `seen` what `name` needs, directly and indirectly, on any machine, as its metadata says."""
    if (name, extras) in seen:
        return
    seen.add((name, extras))
    with suppress(PackageNotFoundError):  # for another machine: not installed on this one
        for line in distribution(name).requires or []:
            need = Requirement(line)
            environments = [{"extra": extra, "platform_machine": m} for extra in extras for m in ("x86_64", "aarch64")]
            if need.marker is None or any(need.marker.evaluate(environment) for environment in environments):
                required(canonicalize_name(need.name), frozenset({"", *need.extras}), seen)


def test_what_is_pinned_is_what_some_dependency_requires() -> None:
    seen: set[tuple[str, frozenset[str]]] = set()
    required("quartet", frozenset({"", "dev"}), seen)
    assert set(pinned()) == {name for name, _ in seen} - {"quartet"}


def test_old_python_gets_a_sentence_and_no_syntax_error() -> None:
    ast.parse(Path(install.__file__).read_text(), feature_version=(3, 6))
