"""`.ci/run`: a clean environment, the README's test command, its exit status, and nothing left running."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAKEFILE = """
check:
	@test "$$CI" = true && test ! -e .venv && echo check >> calls
test:
	@echo test >> calls && mkdir "$$QUARTET_RUN_DIR/4711" && echo "$$QUARTET_RUN_DIR" > run_dir && {end}
stop:
	@echo stop $(PORT) >> calls
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Return a folder with `.ci/run` and an old environment."""
    (tmp_path / ".ci").mkdir()
    shutil.copy2(ROOT / ".ci/run", tmp_path / ".ci/run")
    (tmp_path / ".venv").mkdir()
    return tmp_path


def start(clone: Path, *, end: str) -> subprocess.Popen[bytes]:
    """Start `.ci/run` where the tests leave a stack behind and then do `end`."""
    (clone / "Makefile").write_text(MAKEFILE.format(end=end))
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.Popen([clone / ".ci/run"], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def calls(clone: Path) -> list[str]:
    """Return what make was asked for, in order."""
    return (clone / "calls").read_text().splitlines()


@pytest.mark.parametrize(("end", "succeeds"), [("true", True), ("false", False)])
def test_exit_status_is_that_of_the_tests_and_stacks_are_stopped(end: str, succeeds: bool, clone: Path) -> None:
    assert (start(clone, end=end).wait(timeout=60) == 0) is succeeds
    assert calls(clone) == ["check", "test", "stop 4711"]
    assert not Path((clone / "run_dir").read_text().strip()).exists()


def test_interrupted_run_ends_its_tests_and_stops_the_stacks(clone: Path) -> None:
    run = start(clone, end="sleep 300")
    while not (clone / "run_dir").exists() and run.poll() is None:
        time.sleep(0.02)
    run.send_signal(signal.SIGTERM)
    assert run.wait(timeout=30) == 143
    assert calls(clone) == ["check", "test", "stop 4711"]


def test_test_command_is_the_one_of_the_readme() -> None:
    words = (ROOT / ".ci/run").read_text()
    assert 'timeout --kill-after=30 "$limit_s" make check test' in words
    assert "limit_s=2400" in words
    assert "```bash\nmake test\n```" in (ROOT / "README.md").read_text()
