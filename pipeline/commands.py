"""Commands that look at what the stages made: `verify` and `bench`."""

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from pipeline.artifact import Artifact
from pipeline.chain import materialize, say
from pipeline.config import Recipe
from pipeline.data import open_dataset, preprocessing_of
from pipeline.errors import PipelineError
from pipeline.loader import Images, open_images
from serving.client import RequestFailed


def run_verify(recipe: Recipe, root: Path, options: Namespace) -> int:
    """Compare every hand-over up to the endpoint on `options.port`; 1 when one is breached."""
    from pipeline.verify import print_verdicts, verify  # PyTorch: only this command needs it

    if not options.port.isdecimal() or not 0 < int(options.port) < 65536:
        raise PipelineError(f"--port {options.port} is no port; use a number from 1 to 65535")
    made = _artifacts(recipe, root)
    images = _test_images(recipe, root)
    try:
        verdicts = verify(recipe, made, images, url=f"http://127.0.0.1:{options.port}")
    except RequestFailed as error:
        raise PipelineError(f"{error}; start it with: make serve", exit_status=1) from error
    print_verdicts(verdicts, count=len(images))
    breaches = [f"{v.name} {v.breach}" for v in verdicts if v.breach]
    if breaches:
        raise PipelineError("; ".join(breaches), exit_status=1)
    return 0


def run_bench(recipe: Recipe, root: Path, options: Namespace) -> int:
    """Measure what is about to ship and print the path of the Markdown report."""
    from pipeline.bench.report import bench  # PyTorch: only this command needs it

    if recipe.export.provider != "cpu":
        raise PipelineError(
            f"bench compares CPU times, but export.provider = {recipe.export.provider!r}; what the GPU takes is in the "
            "report of `make compress`"
        )
    made = _artifacts(recipe, root)
    summary = bench(recipe, made, _test_images(recipe, root), root=root)
    say(summary.read_text())
    print(summary)
    return 0


def _artifacts(recipe: Recipe, root: Path) -> dict[str, Artifact]:
    return {artifact.manifest.stage: artifact for artifact in materialize("package", recipe, root=root)}


def _test_images(recipe: Recipe, root: Path) -> Images:
    cache = root / "cache"
    return open_images(open_dataset(recipe.data, cache=cache).test, preprocessing_of(recipe.data), cache=cache)


COMMANDS: dict[str, Callable[[Recipe, Path, Namespace], int]] = {"verify": run_verify, "bench": run_bench}
