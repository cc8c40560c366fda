"""`python -m pipeline STAGE --recipe FILE [--section.field value]`: make a stage and everything before it.

Progress goes to stderr; the last line of stdout is the path of what was made.
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from pipeline import __doc__ as stages
from pipeline.artifact import Artifact
from pipeline.chain import STAGES, materialize
from pipeline.commands import COMMANDS
from pipeline.config import describe_fields, load_recipe
from pipeline.errors import PipelineError

ARTIFACTS = Path("artifacts")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status."""
    parser = _parser()
    options, overrides = parser.parse_known_args(arguments)
    try:
        recipe = load_recipe(options.recipe or ("onnx" if options.onnx else "digits"), _fields(options) + overrides)
        if options.command in COMMANDS:
            return COMMANDS[options.command](recipe, ARTIFACTS, options)
        made = materialize(options.command, recipe, root=ARTIFACTS, force=options.force)
    except PipelineError as error:
        print(f"quartet: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print("quartet: interrupted; the same command continues", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 141
    _show(made)
    return 0


def _fields(options: argparse.Namespace) -> list[str]:
    """Return the recipe's fields that the short forms stand for."""
    short = {
        "--train.nproc": options.nproc,
        "--onnx.file": options.onnx,
        "--data.name": options.data and "imagefolder",
        "--data.root": options.data,
    }
    return [word for field, value in short.items() if value is not None for word in (field, value)]


def _show(made: Sequence[Artifact]) -> None:
    """Print what people want to see of the last artifact, and its path for programs."""
    last = made[-1]
    if last.manifest.stage == "choose":
        from pipeline.report.table import print_report  # only this output needs it

        print_report(last.report, page=last.path / "report" / "report.html")
    archives = [name for name in last.manifest.files if name.endswith(".mar")]
    print(last.file(archives[0]) if archives else last.path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pipeline",
        description=stages,
        epilog="Every field of the recipe may be given on the command line:\n" + "\n".join(describe_fields()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("command", choices=[*STAGES, *COMMANDS])
    parser.add_argument("--recipe", help="a name in pipeline/recipes (default: digits), or the path of a .toml file")
    parser.add_argument("--onnx", metavar="FILE", help="a finished classifier instead of training, for --onnx.file")
    parser.add_argument("--data", metavar="DIR", help="your images, short for --data.name imagefolder --data.root DIR")
    parser.add_argument("--nproc", help="training processes, short for --train.nproc")
    parser.add_argument("--force", action="store_true", help="run the stage again even if its artifact is there")
    parser.add_argument("--port", default="8080", help="verify: where the served stack listens")
    return parser


def _interrupt(number: int, _frame: object) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupt)  # what Ctrl-C does
    sys.exit(main())
