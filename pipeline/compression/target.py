"""How many channels must go so that a share of the multiply-accumulates, or of the measured cost, is gone."""

import json
from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnxruntime

from pipeline.compression.prune import Judged, Rule, going, macs_after
from pipeline.errors import PipelineError
from pipeline.export import export_onnx
from pipeline.measure import measure_interleaved, ratio
from pipeline.models import Classifier
from pipeline.session import open_session, probabilities

MACS_GRID = tuple(n / 100 for n in range(1, 96))  # shares of the channels that are tried
COST_GRID = tuple(n / 20 for n in range(1, 20))  # coarse: the same machine should come to the same answer
COST_ROUNDS = 15


def ratio_for_macs(judged: Judged, *, share: float, dense_macs: int, rule: Rule) -> float:
    """Return the smallest share of channels with which at least `share` of `dense_macs` is gone.

    Raises `PipelineError` that says what can be reached.
    """
    return smallest(
        lambda candidate: 1 - macs_after(judged, going(judged, ratio=candidate, rule=rule)) / dense_macs,
        grid=MACS_GRID,
        share=share,
        of="macs",
    )


def ratio_for_cost(dense: Classifier, pruned: Callable[[float], Classifier], *, share: float) -> float:
    """Return the smallest share of channels, of a coarse grid, with which at least `share` of the cost is gone.

    `pruned` makes the candidate for a share of channels. Cost is CPU time of one image in ONNX Runtime with one thread,
    in rounds interleaved with the dense model's. Raises `PipelineError` that says what can be reached.
    """
    with TemporaryDirectory() as folder:
        baseline = _opened(dense, Path(folder) / "dense.onnx")

        def gone(candidate: float) -> float:
            session = _opened(pruned(candidate), Path(folder) / "pruned.onnx")
            return 1 - 1 / cost_gain(baseline, session, dense)

        return smallest(gone, grid=COST_GRID, share=share, of="cost")


def smallest(gone: Callable[[float], float], *, grid: tuple[float, ...], share: float, of: str) -> float:
    """Return the first value of `grid` with which at least `share` is gone, by bisection: more channels, more gone."""
    place = bisect_left(grid, True, key=lambda candidate: gone(candidate) >= share)
    if place == len(grid):
        raise PipelineError(
            f"compress.prune.ratio = {share:g} of target {of!r} cannot be reached: at most {gone(grid[-1]):.2f} can go "
            "with this round_to, keep and importance; ask for less"
        )
    return grid[place]


def remembered(path: Path, find: Callable[[], float]) -> float:
    """Return the number in `path`; find it and write it there first where there is none, whole or not at all."""
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(".partial")
        scratch.write_text(json.dumps(find()))
        scratch.rename(path)
    return float(json.loads(path.read_text()))


def cost_gain(
    baseline: onnxruntime.InferenceSession, session: onnxruntime.InferenceSession, model: Classifier
) -> float:
    """Return how many times cheaper one image is in `session`: the median over interleaved rounds."""
    spec = model.spec
    image = np.random.default_rng(0).integers(0, 256, (1, spec.height, spec.width, spec.channels), np.uint8)
    costs = measure_interleaved(
        {name: partial(probabilities, s, image) for name, s in (("dense", baseline), ("pruned", session))},
        rounds=COST_ROUNDS,
    )
    return ratio(costs["dense"], costs["pruned"]).median


def _opened(model: Classifier, path: Path) -> onnxruntime.InferenceSession:
    export_onnx(model, path, opset=20, metadata={})
    return open_session(path)
