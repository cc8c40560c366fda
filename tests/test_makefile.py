"""The Makefile: what it prints, in which order it runs, and that it hands values on untouched."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.install import STAMP, fingerprint

ROOT = Path(__file__).resolve().parent.parent
TARGETS = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
RECORDER = """#!{python}
import json, os, sys
names = ("RECIPE", "ONNX", "DATA", "NPROC", "REPLICAS", "PORT", "IMAGE", "FORCE", "ARGS")
with open({log!r}, "a") as stream:
    stream.write(json.dumps([sys.argv[1:], {{name: os.environ.get(name) for name in names}}]) + "\\n")
sys.exit({status})
"""


class Sandbox:
    """A folder with the Makefile, and an environment whose Python only notes how it was called."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.venv, self.log = folder, folder / "a venv", folder / "calls.jsonl"
        for name in ("Makefile", "pyproject.toml", "pipeline/install.py", "pipeline/constraints.txt"):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())
        self.record()
        (self.venv / STAMP).write_text(json.dumps(fingerprint(self.venv, root=folder)))

    def record(self, *, status: int = 0) -> None:
        """Let the environment's Python exit with `status` from now on."""
        (self.venv / "bin").mkdir(parents=True, exist_ok=True)
        python = self.venv / "bin/python"
        python.write_text(RECORDER.format(python=sys.executable, log=str(self.log), status=status))
        python.chmod(0o755)

    def make(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run make with these words."""
        clean = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "PORT")}
        return subprocess.run(
            ["make", "--no-print-directory", f"VENV={self.venv}", f"PYTHON={sys.executable}", *words],
            cwd=self.folder,
            env={**clean, **environment},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    @property
    def calls(self) -> list[tuple[list[str], dict[str, str]]]:
        """Return arguments and variables of each call, in order."""
        return [tuple(json.loads(line)) for line in self.log.read_text().splitlines()] if self.log.exists() else []


@pytest.fixture
def sandbox(tmp_path: Path) -> Sandbox:
    return Sandbox(tmp_path)


def test_help_prints_one_line_for_every_target_and_is_the_default(sandbox: Sandbox) -> None:
    printed = sandbox.make().stdout
    assert printed == sandbox.make("help").stdout
    assert re.findall(r"^  ([a-z-]+)  +\S.{10}", printed, re.MULTILINE) == TARGETS
    assert max(map(len, printed.splitlines())) <= 120
    assert sandbox.calls == []


def test_every_target_is_phony() -> None:
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    assert phony.group(1).split() == TARGETS


def test_chain_runs_in_the_order_of_its_words_even_in_parallel(sandbox: Sandbox) -> None:
    assert sandbox.make("-j8", "train", "compress", "serve").returncode == 0
    assert [call[0] for call in sandbox.calls] == [
        ["-m", "pipeline.make", "train"],
        ["-m", "pipeline.make", "compress"],
        ["-m", "pipeline.make", "serve"],
    ]


def test_values_arrive_as_they_were_typed(sandbox: Sandbox) -> None:
    nasty = """it's a "file" $HOME $(shell false) `id`; \\ #1 %.png"""
    done = sandbox.make(
        "predict",
        f"IMAGE={nasty}",
        f"RECIPE={nasty}",
        f"ARGS={nasty}",
        f"ONNX={nasty}",
        "PORT=81 82",
        NPROC="$2",
        FORCE="1",
    )
    assert done.returncode == 0, done.stderr
    ((words, values),) = sandbox.calls
    assert words == ["-m", "pipeline.make", "predict"]
    assert values == {
        "IMAGE": nasty,
        "RECIPE": nasty,
        "ONNX": nasty,
        "DATA": "",
        "ARGS": nasty,
        "PORT": "81 82",
        "NPROC": "$2",
        "REPLICAS": "",
        "FORCE": "",
    }


def test_recipe_is_given_on_the_command_line_or_by_the_environment(sandbox: Sandbox) -> None:
    sandbox.make("train")
    sandbox.make("train", RECIPE="mnist")
    sandbox.make("train", "RECIPE=cifar10")
    assert [values["RECIPE"] for _, values in sandbox.calls] == ["", "mnist", "cifar10"]


def test_images_are_given_on_the_command_line_only(sandbox: Sandbox) -> None:
    sandbox.make("train", DATA="somebody else's")
    sandbox.make("train", "DATA=photos")
    assert [values["DATA"] for _, values in sandbox.calls] == ["", "photos"]


def test_complete_environment_is_not_installed_again(sandbox: Sandbox) -> None:
    done = sandbox.make("install")
    assert (done.returncode, done.stdout, done.stderr, sandbox.calls) == (0, "", "", [])


def test_changed_pins_call_pip_once_and_then_run_the_target(sandbox: Sandbox) -> None:
    (sandbox.folder / "pyproject.toml").write_text("[project]\n")
    assert sandbox.make("train").returncode == 0
    assert sandbox.make("train").returncode == 0
    assert [words[:3] for words, _ in sandbox.calls] == [
        ["-m", "pip", "install"],
        ["-m", "pipeline.make", "train"],
        ["-m", "pipeline.make", "train"],
    ]
    pip = sandbox.calls[0][0]
    assert pip[-4:] == ["-c", str(sandbox.folder / "pipeline/constraints.txt"), "-e", f"{sandbox.folder}[dev]"]


def test_failed_installation_stops_everything_with_status_two(sandbox: Sandbox) -> None:
    sandbox.record(status=1)
    (sandbox.folder / "pyproject.toml").write_text("[project]\n")
    done = sandbox.make("train")
    assert done.returncode == 2
    assert [words[1] for words, _ in sandbox.calls] == ["pip"]


def test_check_asks_for_format_lint_and_types(sandbox: Sandbox) -> None:
    sandbox.make("check")
    assert [words[1:] for words, _ in sandbox.calls] == [
        ["ruff", "format", "--check", "."],
        ["ruff", "check", "."],
        ["mypy"],
    ]


@pytest.mark.parametrize("target", ["stop", "status", "logs", "clean"])
def test_looking_at_nothing_installs_nothing(target: str, sandbox: Sandbox) -> None:
    (sandbox.folder / "artifacts").mkdir()
    done = sandbox.make(target, "VENV=nowhere")
    assert done.returncode == 0
    assert done.stdout == "nothing is installed yet, so nothing runs: make install\n"
    assert not (sandbox.folder / "nowhere").exists()


def test_clean_stops_the_stack_and_then_keeps_only_the_readme(sandbox: Sandbox) -> None:
    stage = sandbox.folder / "artifacts/train/0123"
    stage.mkdir(parents=True)
    (stage / "manifest.json").touch()
    readme = sandbox.folder / "artifacts/README.md"
    readme.touch()
    assert sandbox.make("clean").returncode == 0
    assert [words[-1] for words, _ in sandbox.calls] == ["stop"]
    assert list((sandbox.folder / "artifacts").iterdir()) == [readme]


def test_clean_deletes_nothing_while_the_stack_does_not_stop(sandbox: Sandbox) -> None:
    (sandbox.folder / "artifacts/train").mkdir(parents=True)
    sandbox.record(status=1)
    assert sandbox.make("clean").returncode == 2
    assert (sandbox.folder / "artifacts/train").exists()


def test_distclean_removes_the_environment_and_the_caches(sandbox: Sandbox) -> None:
    for name in (".venv/bin", "artifacts", ".mypy_cache", "pipeline/__pycache__", "quartet.egg-info"):
        (sandbox.folder / name).mkdir(parents=True)
    assert sandbox.make("distclean").returncode == 0
    left = {str(p.relative_to(sandbox.folder)) for p in sandbox.folder.rglob("*") if p.is_dir()}
    assert left == {"a venv", "a venv/bin", "artifacts", "pipeline"}
