"""Run a stage in several processes under torchrun, and hand back what the leading one returned.

The calling process decides and publishes; the ranks only work. `python -m pipeline.launch` is torchrun or a rank.
"""

import contextlib
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
AGENT, RANK = "agent", "rank"
PR_SET_PDEATHSIG = 1  # prctl(2)


def run_ranks(function: str, context: Context, *, nproc: int, device: str, threads: int) -> StageResult:
    """Run the stage `module:function` in `nproc` processes and return the result.

    Raises `PipelineError` with the first failing process's own message. No process is left, whatever happens here.
    """
    scratch = context.out.with_name(context.out.name + ".launch")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    try:
        return _run(scratch, function, context, nproc=nproc, device=device, threads=threads)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _run(scratch: Path, function: str, context: Context, *, nproc: int, device: str, threads: int) -> StageResult:
    task = {
        "function": function,
        "device": device,
        "recipe": context.recipe.model_dump(mode="json") | {"data": _with_root(context.recipe)},
        "source": str(context.source.path) if context.source else None,
        "paths": {name: str(getattr(context, name)) for name in ("out", "resume", "cache", "telemetry")},
    }
    (scratch / TASK).write_text(json.dumps(task))
    # Loopback: a host name that does not resolve must not stop training on one machine.
    torchrun = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={nproc}", "--log-dir", str(scratch)]
    command = [sys.executable, "-m", "pipeline.launch", AGENT, str(scratch), *torchrun]
    command += ["-m", "pipeline.launch", RANK, str(scratch)]
    environment = os.environ | {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # cuBLAS repeats its results only with this
        "OMP_NUM_THREADS": str(threads),
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "LOGLEVEL": "CRITICAL",  # the agent's account of a failure is printed once, by us
    }
    # A group of its own: a terminal sends Ctrl-C to ours, and every rank would print its trace.
    process = subprocess.Popen(command, env=environment, stdout=sys.stderr, process_group=0)
    status = _wait(process)
    if status != 0:
        raise _failure(scratch, status)
    return StageResult(**json.loads((scratch / RESULT).read_text()))


def _with_root(recipe: Recipe) -> dict[str, object]:
    """Return [data] with the folder that the manifest leaves out."""
    root = recipe.data.root
    return recipe.data.model_dump(mode="json") | ({"root": str(root.expanduser().resolve())} if root else {})


def _die_with_parent() -> None:
    """Ask the kernel to end this process when its parent ends, even by SIGKILL: a rank must not outlive its run."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Wait for torchrun. SIGTERM and Ctrl-C kill it, and its ranks with it.

    Asked to end, the ranks would end one after the other, and each would complain of losing the others. Nothing is lost
    by killing them: a run that is killed at any instant continues.
    """

    def stop(number: int, _frame: object) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.kill()
        process.wait()
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _failure(scratch: Path, status: int) -> PipelineError:
    path = scratch / ERROR
    if path.is_file():
        told = json.loads(path.read_text())
        return PipelineError(told["message"], exit_status=told["exit_status"])
    return PipelineError(f"the processes ended with status {status}; the first error above is the cause", exit_status=1)


def _tell(error: PipelineError, scratch: Path, *, rank: int) -> None:
    """Leave the message for the calling process. All ranks may fail at once: the first one's file stands, whole."""
    own = scratch / f"error-{rank}.json"
    own.write_text(json.dumps({"message": str(error), "exit_status": error.exit_status}))
    with contextlib.suppress(FileExistsError):
        os.link(own, scratch / ERROR)


def _be_the_agent(scratch: Path, torchrun: list[str]) -> None:
    """Be torchrun, but without a trace when a rank has said what the user did wrong."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        run.main(torchrun)
    except ChildFailedError as error:
        if not (scratch / ERROR).is_file():
            print(error, file=sys.stderr)
        sys.exit(1)


def _be_a_rank(scratch: Path) -> None:
    """Do one rank's work; a user's mistake goes to a file, from which the caller prints it once."""
    if AGENT.encode() not in Path(f"/proc/{os.getppid()}/cmdline").read_bytes().split(b"\0"):
        sys.exit(1)  # it was gone before this process could tie itself to it
    from pipeline.training.group import Group, joined  # PyTorch: the calling process must not wait for it

    task = json.loads((scratch / TASK).read_text())
    module, _, name = task["function"].partition(":")
    function: Callable[[Context, Group], StageResult | None] = getattr(importlib.import_module(module), name)
    source = load_artifact(Path(task["source"])) if task["source"] else None
    context = Context(
        recipe=Recipe.model_validate(task["recipe"]),
        source=source,
        **{name: Path(value) for name, value in task["paths"].items()},
    )
    with joined(task["device"]) as group:
        try:
            result = function(context, group)
        except PipelineError as error:
            _tell(error, scratch, rank=group.rank)
            os._exit(1)  # leaving the group would wait for processes that may be stuck in a collective
    if result is not None:
        (scratch / RESULT).write_text(json.dumps(asdict(result)))


if __name__ == "__main__":
    _die_with_parent()
    role, folder, *rest = sys.argv[1:]
    if role == AGENT:
        _be_the_agent(Path(folder), rest)
    else:
        _be_a_rank(Path(folder))
