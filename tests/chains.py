"""Short runs of the real chain, for tests: the digits with a small network and few epochs."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

FAST = (
    "--train.device=cpu",
    "--model.name=lenet",
    "--data.augment=",
    "--train.epochs=3",
    "--train.checkpoint_steps=5",
    "--compress.recover.epochs=2",
    "--compress.quantize.min_gain=0",  # layers this small gain nothing, and the candidates are to be tested
    "--choose.rounds=5",
)
TIMEOUT_S = 300


def pipeline_command(*arguments: str) -> list[str]:
    """Return the command line that people type."""
    return [sys.executable, "-m", "pipeline", *arguments]


def run_pipeline(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m pipeline` in `folder` to its end."""
    return subprocess.run(
        pipeline_command(*arguments), cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


def made(folder: Path, *arguments: str) -> Path:
    """Run `python -m pipeline`, which must succeed, and return the path that it prints."""
    done = run_pipeline(folder, *arguments)
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.strip().splitlines()[-1]


def kill_after(folder: Path, delay_s: float, *arguments: str) -> bool:
    """Start `python -m pipeline`, SIGKILL it after `delay_s` unless it has ended; tell whether it was killed."""
    with (folder / "killed.log").open("ab") as log:
        process = subprocess.Popen(pipeline_command(*arguments), cwd=folder, stdout=log, stderr=log)
    try:
        process.wait(timeout=delay_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.wait()
        return True
    return False


def processes_in(folder: Path) -> list[int]:
    """Return the ids of the processes whose working directory is `folder`."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                if (entry / "cwd").resolve() == folder.resolve():
                    found.append(int(entry.name))
            except OSError:
                continue  # it ended, or is somebody else's
    return found


def wait_until_gone(folder: Path, *, timeout_s: float = 30) -> list[int]:
    """Wait until no process works in `folder`; return those that still do."""
    deadline = time.monotonic() + timeout_s
    while (left := processes_in(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left
