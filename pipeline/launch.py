"""Run a stage in several processes under torchrun, and hand back what the leading one returned.

The calling process decides and publishes; the ranks only work. `python -m pipeline.launch FOLDER` is a rank.
"""

import ctypes
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from pipeline.artifact import StageResult, load_artifact
from pipeline.config import Recipe
from pipeline.errors import PipelineError
from pipeline.stage import Context

TASK = "task.json"
RESULT = "result.json"
ERROR = "error.json"
STOP_TIMEOUT_S = 10
PR_SET_PDEATHSIG = 1  # prctl(2)


def run_ranks(function: str, context: Context, *, nproc: int, device: str, threads: int) -> StageResult:
    """Run the stage `module:function` in `nproc` processes and return the result.

    Raises `PipelineError` with the first failing process's own message. No process is left, whatever happens here.
    """
    scratch = context.out.with_name(context.out.name + ".launch")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    task = {
        "function": function,
        "device": device,
        "recipe": context.recipe.model_dump(mode="json") | {"data": _with_root(context.recipe)},
        "source": str(context.source.path) if context.source else None,
        "paths": {name: str(getattr(context, name)) for name in ("out", "resume", "cache", "telemetry")},
    }
    (scratch / TASK).write_text(json.dumps(task))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
    command += ["--log-dir", str(scratch)]
    command += ["-m", "pipeline.launch", str(scratch)]
    # Loopback: a host name that does not resolve must not stop training on one machine.
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    process = subprocess.Popen(command, env=environment, preexec_fn=_die_with_parent, stdout=sys.stderr)
    status = _wait(process)
    if status != 0:
        raise _failure(scratch, status)
    fields = json.loads((scratch / RESULT).read_text())
    shutil.rmtree(scratch)
    return StageResult(**fields)


def _with_root(recipe: Recipe) -> dict[str, object]:
    """Return [data] with the folder that the manifest leaves out."""
    root = recipe.data.root
    return recipe.data.model_dump(mode="json") | ({"root": str(root.expanduser().resolve())} if root else {})


def _die_with_parent() -> None:
    """Ask the kernel to end this process when its parent ends, even by SIGKILL: a rank must not outlive its run."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Wait for torchrun, and pass on SIGTERM and Ctrl-C; it ends its ranks, and they end with it in any case."""

    def stop(number: int, _frame: object) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.terminate()
        try:
            process.wait(timeout=STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _failure(scratch: Path, status: int) -> PipelineError:
    path = scratch / ERROR
    if path.is_file():
        told = json.loads(path.read_text())
        return PipelineError(told["message"], exit_status=told["exit_status"])
    return PipelineError(f"the processes ended with status {status}; the first error above is the cause", exit_status=1)


def _be_a_rank(scratch: Path) -> None:
    """Do one rank's work; a user's mistake goes to a file, from which the caller prints it once."""
    from pipeline.training.group import Group, joined  # PyTorch: the calling process must not wait for it

    _die_with_parent()
    task = json.loads((scratch / TASK).read_text())
    module, _, name = task["function"].partition(":")
    function: Callable[[Context, Group], StageResult | None] = getattr(importlib.import_module(module), name)
    source = load_artifact(Path(task["source"])) if task["source"] else None
    context = Context(
        recipe=Recipe.model_validate(task["recipe"]),
        source=source,
        **{name: Path(value) for name, value in task["paths"].items()},
    )
    try:
        with joined(task["device"]) as group:
            result = function(context, group)
    except PipelineError as error:
        told = {"message": str(error), "exit_status": error.exit_status}
        (scratch / ERROR).write_text(json.dumps(told))
        sys.exit(1)
    if result is not None:
        (scratch / RESULT).write_text(json.dumps(asdict(result)))


if __name__ == "__main__":
    _be_a_rank(Path(sys.argv[1]))
