"""What make's targets run: turns RECIPE=, ONNX=, NPROC=, PORT=, FORCE=, ARGS= and the like into command lines.

Values come from the environment as they were typed, so that a space or a quote in one never meets a shell.
"""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import PipelineError

STAGE_OF = {"train": "train", "compress": "choose", "package": "package", "serve": "package", "verify": "package"}
LARGEST = {"REPLICAS": 999, "PORT": 65535}
SERVED = ("stop", "status", "logs", "predict")


@dataclass(frozen=True)
class Values:
    """What the user gave make; an empty string was not given."""

    recipe: str = ""
    onnx: str = ""
    data: str = ""
    nproc: str = ""
    replicas: str = ""
    port: str = ""
    image: str = ""
    force: bool = False
    args: tuple[str, ...] = ()


def read_values(environment: Mapping[str, str]) -> Values:
    """Read make's variables; ARGS is split like words of a shell.

    Raises `PipelineError` for an open quote, and for a number that only serving would refuse, after all was built.
    """
    args = environment.get("ARGS", "")
    try:
        words = tuple(shlex.split(args))
    except ValueError as error:
        raise PipelineError(f"ARGS={args}: {str(error).lower()}; close the quote") from error
    for name, largest in LARGEST.items():
        value = environment.get(name, "")
        if value and not (value.isdecimal() and 1 <= int(value) <= largest):
            raise PipelineError(f"{name}={value} will not do; use a whole number from 1 to {largest}")
    force = environment.get("FORCE", "")
    if force not in ("", "0", "1"):
        raise PipelineError(f"FORCE={force} will not do; FORCE=1 makes again what is there already")
    return Values(
        recipe=environment.get("RECIPE", ""),
        onnx=environment.get("ONNX", ""),
        data=environment.get("DATA", ""),
        nproc=environment.get("NPROC", ""),
        replicas=environment.get("REPLICAS", ""),
        port=environment.get("PORT", ""),
        image=environment.get("IMAGE", ""),
        force=force == "1",
        args=words,
    )


def pipeline_command(stage: str, values: Values) -> list[str]:
    """Return the command that makes `stage` and everything before it."""
    command = [sys.executable, "-m", "pipeline", stage, *_option("--recipe", values.recipe)]
    command += [*_option("--onnx", values.onnx), *_option("--data", values.data)]
    command += ["--force"] if values.force and stage in STAGE_OF.values() else []
    return [*command, *_option("--nproc", values.nproc), *values.args]


def start_command(archive: str, values: Values) -> list[str]:
    """Return the command that serves `archive` and tries it with IMAGE, or else with the image held out for that."""
    image = values.image or str(next(Path(archive).parent.glob("held-out-*")))
    command = [sys.executable, "-m", "serving", "start", "--mar", archive, "--image", image]
    return [*command, *_option("--replicas", values.replicas), *_option("--port", values.port)]


def serving_command(verb: str, values: Values) -> list[str]:
    """Return the command that asks the served stack; `predict` needs an image.

    `stop` has no use for ARGS: in `make stop serve ARGS="--data.root photos"` they are meant for what follows.
    """
    command = [sys.executable, "-m", "serving", verb, *_option("--port", values.port)]
    if verb == "predict":
        if not values.image:
            raise PipelineError("which image? make predict IMAGE=path")
        command += ["--image", values.image]
    return command if verb == "stop" else [*command, *values.args]


def run_target(target: str, values: Values) -> None:
    """Run what `target` stands for; raises `subprocess.CalledProcessError` at the first command that fails."""
    if target == "test":
        _run([sys.executable, "-m", "pytest", *values.args])
    elif target in SERVED:
        _run(serving_command(target, values))
    elif target == "bench":
        _run(pipeline_command("bench", values))
    elif target in ("serve", "verify"):
        _run(start_command(_last_line_of(pipeline_command("package", values)), values))
        if target == "verify":
            _run([*pipeline_command("verify", values), *_option("--port", values.port)])
    else:
        _run(pipeline_command(STAGE_OF[target], values))


def main(target: str) -> int:
    """Run one target; return the exit status of the command that failed, or 0."""
    try:
        run_target(target, read_values(os.environ))
    except PipelineError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    except subprocess.CalledProcessError as error:
        return error.returncode if error.returncode >= 0 else 128 - error.returncode  # the command has said why
    except KeyboardInterrupt as stopped:
        return 128 + (stopped.args[0] if stopped.args else signal.SIGINT)
    return 0


def _option(name: str, value: str) -> list[str]:
    return [name, value] if value else []


def _run(command: list[str], *, stdout: int | None = None) -> str:
    """Run `command` to its end; return what it printed, if `stdout` is a pipe.

    Raises `subprocess.CalledProcessError` when it fails. Stopped, this waits until the command has cleaned up, and
    raises `KeyboardInterrupt(signal number)`: Ctrl-C has reached the command, too, and SIGTERM is passed on.
    """
    received: list[int] = []
    child: subprocess.Popen[str] | None = None

    def note(number: int, _frame: object) -> None:
        received.append(number)
        if child is not None and number == signal.SIGTERM:
            child.terminate()

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        child = subprocess.Popen(command, stdout=stdout, text=True)
        if signal.SIGTERM in received:  # it came before there was a child to tell
            child.terminate()
        printed = child.communicate()[0] or ""
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if received:
        raise KeyboardInterrupt(received[0])
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, command)
    return printed


def _last_line_of(command: list[str]) -> str:
    """Run `command` and return the last line that it prints: the path of what it made."""
    return _run(command, stdout=subprocess.PIPE).strip().splitlines()[-1]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
