"""`python -m pipeline.bench.choices --recipe digits`: measure and choose again and again, and count what is chosen.

The candidates are those of the export stage; each repetition is a process of its own, as `make compress` is. Nothing
is published.
"""

import sys
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from pipeline.chain import materialize, say
from pipeline.choose import decide, graphs_of, measure
from pipeline.compression.candidates import DENSE
from pipeline.config import Recipe, load_recipe
from pipeline.data import open_dataset, preprocessing_of
from pipeline.errors import PipelineError
from pipeline.evaluate import Candidate
from pipeline.loader import open_images
from pipeline.machine import cpu_facts

ARTIFACTS = Path("artifacts")


@dataclass(frozen=True)
class Repetition:
    """One choice. `gap` is how many times dearer the runner-up was: the cheapest other one that could have shipped."""

    chosen: str
    runner_up: str
    gap: float
    speedups: dict[str, float]
    rounds: int


def repeat_once(recipe: Recipe, graphs: dict[str, Path]) -> Repetition:
    """Measure the candidates and choose, as the choose stage does."""
    cache = ARTIFACTS / "cache"
    validation = open_images(open_dataset(recipe.data, cache=cache).val, preprocessing_of(recipe.data), cache=cache)
    measured = measure(graphs, validation, config=recipe.choose)
    chosen = decide(measured.candidates, budget=recipe.choose.budget, force=recipe.choose.force).name
    runner_up, gap = gap_behind(chosen, measured.candidates, budget=recipe.choose.budget)
    return Repetition(chosen, runner_up, gap, {c.name: c.speedup for c in measured.candidates}, measured.rounds)


def gap_behind(chosen: str, candidates: Sequence[Candidate], *, budget: float) -> tuple[str, float]:
    """Return what would ship without the chosen one, and how many times dearer it is; for fp32, itself and 1."""
    others = [c for c in candidates if c.name != chosen or c.name == DENSE]
    speedups = {c.name: c.speedup for c in candidates}
    runner_up = decide(others, budget=budget, force=None).name
    return runner_up, speedups[chosen] / speedups[runner_up]


def markdown(repetitions: Sequence[Repetition]) -> str:
    """Return how often each candidate was chosen, and every candidate's speed-up over the repetitions."""
    times = Counter(r.chosen for r in repetitions)
    gaps = [r.gap for r in repetitions]
    rounds = [r.rounds for r in repetitions]
    runners_up = ", ".join(sorted({r.runner_up for r in repetitions}))
    lines = [
        f"{len(repetitions)} choices: " + ", ".join(f"{name} {count}" for name, count in times.most_common()),
        f"behind it {runners_up}, {np.median(gaps):.3f} times dearer ({min(gaps):.3f}-{max(gaps):.3f}); "
        f"{min(rounds)}-{max(rounds)} rounds; {cpu_facts()['name']}",
        "",
        "| candidate | chosen | speed-up, median | least | most |",
        "|---|---:|---:|---:|---:|",
    ]
    for name in repetitions[0].speedups:
        found = [r.speedups[name] for r in repetitions]
        lines.append(f"| {name} | {times[name]} | {np.median(found):.3f} | {min(found):.3f} | {max(found):.3f} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 1 when not every choice was the same."""
    parser = ArgumentParser(prog="python -m pipeline.bench.choices", description=__doc__, allow_abbrev=False)
    parser.add_argument("--recipe", default="digits")
    parser.add_argument("--times", type=int, default=10)
    options, overrides = parser.parse_known_args(arguments)
    try:
        recipe = load_recipe(options.recipe, overrides)
        graphs = graphs_of(materialize("export", recipe, root=ARTIFACTS)[-1])
        repetitions: list[Repetition] = []
        with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
            for repetition in pool.imap(partial(repeat_once, graphs=graphs), [recipe] * options.times):
                repetitions.append(repetition)
                say(f"{repetition.chosen}, {repetition.runner_up} {repetition.gap:.3f}x, {repetition.rounds} rounds")
    except PipelineError as error:
        print(f"quartet: {error}", file=sys.stderr)
        return error.exit_status
    print(markdown(repetitions))
    return int(len({r.chosen for r in repetitions}) > 1)


if __name__ == "__main__":
    sys.exit(main())
