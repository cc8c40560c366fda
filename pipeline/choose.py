"""Measure every candidate on this machine and pick the one to ship: the cheapest within the accuracy budget."""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from rich.console import Console
from rich.table import Table

from pipeline.artifact import StageResult
from pipeline.compression.candidates import DENSE
from pipeline.config import ChooseConfig
from pipeline.data import open_dataset, preprocessing_of
from pipeline.errors import PipelineError
from pipeline.loader import Images, open_images
from pipeline.machine import cpu_facts
from pipeline.measure import measure_interleaved, ratio
from pipeline.session import open_session, probabilities
from pipeline.stage import Context, data_facts

SAME_COST = 0.03  # costs closer than this are called equal, and accuracy decides
EVALUATION_BATCH = 64


@dataclass(frozen=True)
class Candidate:
    """One row of the table."""

    name: str
    val_top1: float
    val_images: int
    size_bytes: int
    cost_ms: float  # CPU milliseconds for one image
    cost_spread_ms: float
    speedup: float  # over fp32
    speedup_low: float  # 95 % interval
    speedup_high: float
    first_call_ms: float


@dataclass(frozen=True)
class Choice:
    """Which candidate ships, and why, in one sentence."""

    name: str
    reason: str


def choose(context: Context) -> StageResult:
    """Evaluate and measure every candidate, decide, and publish the chosen graph as `model.onnx`."""
    recipe, source = context.recipe, context.parent
    dataset = open_dataset(recipe.data, cache=context.cache)
    spec = preprocessing_of(recipe.data)
    validation = open_images(dataset.val, spec, cache=context.cache)
    names = list(source.manifest.models)
    if recipe.choose.force is not None and recipe.choose.force not in names:
        raise PipelineError(f"choose.force = {recipe.choose.force!r} is no candidate; use one of {', '.join(names)}")
    candidates = measure_candidates(
        {name: source.file(f"{name}.onnx") for name in names}, validation, config=recipe.choose
    )
    choice = decide(candidates, budget=recipe.choose.budget, force=recipe.choose.force)
    (context.out / "model.onnx").write_bytes(source.file(f"{choice.name}.onnx").read_bytes())
    (context.out / "report").mkdir()
    draw(candidates, choice, context.out / "report" / "candidates.png", budget=recipe.choose.budget)
    return StageResult(
        data=data_facts(dataset, spec),
        models={choice.name: source.manifest.models[choice.name]},
        metrics={f"{c.name}_val_top1": c.val_top1 for c in candidates},
        report=report_of(candidates, choice, config=recipe.choose),
    )


def measure_candidates(graphs: dict[str, Path], validation: Images, *, config: ChooseConfig) -> list[Candidate]:
    """Return a row for every graph: accuracy on all validation images, cost in interleaved rounds."""
    sessions = {name: open_session(path) for name, path in graphs.items()}
    sample = validation.batch(np.arange(config.batch_size) % len(validation))
    costs = measure_interleaved(
        {name: partial(probabilities, session, sample) for name, session in sessions.items()},
        rounds=config.rounds,
    )
    rows: list[Candidate] = []
    for name, path in graphs.items():
        cost, gain = costs[name], ratio(costs[DENSE], costs[name])
        rows.append(
            Candidate(
                name=name,
                val_top1=top1(sessions[name], validation),
                val_images=len(validation),
                size_bytes=path.stat().st_size,
                cost_ms=cost.median_ms / config.batch_size,
                cost_spread_ms=cost.spread_ms / config.batch_size,
                speedup=gain.median,
                speedup_low=gain.low,
                speedup_high=gain.high,
                first_call_ms=cost.first_call_ms,
            )
        )
    return rows


def top1(session: onnxruntime.InferenceSession, images: Images) -> float:
    """Return the share of right answers over all images, in [0, 1]."""
    answers = np.concatenate([probabilities(session, pixels) for pixels in images.batches(EVALUATION_BATCH)])
    return float((answers.argmax(1) == images.split.labels).mean())


def decide(candidates: Sequence[Candidate], *, budget: float, force: str | None) -> Choice:
    """Return the cheapest candidate within `budget` points of the dense one's accuracy that is proven not slower.

    Costs within 3 % of the cheapest count as equal: of those the most accurate ships, then the smallest.
    """
    if force is not None:
        return Choice(force, f"{force} was asked for with choose.force")
    dense = next(c for c in candidates if c.name == DENSE)
    floor = dense.val_top1 - budget / 100
    fit = [c for c in candidates if c is dense or (c.val_top1 >= floor - 1e-12 and c.speedup_low > 1)]
    cheapest = min(c.cost_ms for c in fit)
    equal = [c for c in fit if c.cost_ms <= cheapest * (1 + SAME_COST)]
    best = max(equal, key=lambda c: (c.val_top1, -c.size_bytes))
    if best is dense:
        return Choice(DENSE, f"kept {DENSE}: {_why_not(candidates, dense, floor)}")
    lost = (dense.val_top1 - best.val_top1) * 100
    return Choice(
        best.name,
        f"{best.name} is the cheapest of those within {budget:g} points of {DENSE}: {best.speedup:.2f}x "
        f"[{best.speedup_low:.2f}, {best.speedup_high:.2f}], {lost:+.2f} points lost",
    )


def _why_not(candidates: Sequence[Candidate], dense: Candidate, floor: float) -> str:
    reasons = [
        f"{c.name} was {c.speedup:.2f}x"
        if c.val_top1 >= floor - 1e-12
        else f"{c.name} lost {(dense.val_top1 - c.val_top1) * 100:.2f} points"
        for c in candidates
        if c is not dense
    ]
    return ", ".join(reasons)


def print_report(report: dict[str, Any]) -> None:
    """Print the table of candidates and the reason for the choice to stderr, from the stage's report."""
    choice, conditions = Choice(**report["choice"]), report["conditions"]
    title = f"Candidates: batch {conditions['batch_size']}, one thread, {conditions['cpu']['name']}"
    table = Table(title=title, title_justify="left")
    for heading in ("candidate", "top-1 (val)", "CPU ms/image", "speed-up (95 %)", "kB"):
        table.add_column(heading, justify="left" if heading == "candidate" else "right", no_wrap=True)
    for c in (Candidate(**row) for row in report["candidates"]):
        table.add_row(
            f"{'->' if c.name == choice.name else '  '} {c.name}",
            f"{c.val_top1:.2%}",
            f"{c.cost_ms:.3f} +-{c.cost_spread_ms:.3f}",
            f"{c.speedup:.2f}x ({c.speedup_low:.2f}-{c.speedup_high:.2f})",
            f"{c.size_bytes / 1000:,.0f}",
        )
    console = Console(file=sys.stderr)
    console.print(table)
    console.print(choice.reason, highlight=False)


def report_of(candidates: Sequence[Candidate], choice: Choice, *, config: ChooseConfig) -> dict[str, Any]:
    """Return the table as plain values, with the conditions under which it was measured."""
    return {
        "choice": asdict(choice),
        "candidates": [asdict(c) for c in candidates],
        "conditions": {
            "cpu": cpu_facts(),
            "threads": 1,
            "batch_size": config.batch_size,
            "rounds": config.rounds,
            "clock": "process CPU time, candidates interleaved in random order, warm-up excluded",
            "onnxruntime": onnxruntime.__version__,
        },
    }


def draw(candidates: Sequence[Candidate], choice: Choice, path: Path, *, budget: float) -> None:
    """Draw accuracy against cost; the area of a marker is the size of the file, the dashed line the accuracy budget."""
    from matplotlib.figure import Figure  # takes a second to import

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    largest = max(c.size_bytes for c in candidates)
    for place, c in enumerate(sorted(candidates, key=lambda c: c.cost_ms)):
        chosen = c.name == choice.name
        axes.scatter(
            c.cost_ms,
            c.val_top1 * 100,
            s=60 + 600 * c.size_bytes / largest,
            color="#1f6feb" if chosen else "#9aa4b2",
            alpha=0.75,
            edgecolor="black" if chosen else "none",
            zorder=3,
        )
        axes.annotate(
            f"{c.name}, {c.size_bytes / 1000:,.0f} kB",
            (c.cost_ms, c.val_top1 * 100),
            xytext=(0, 30 if place % 2 else -36),  # neighbours in cost are often neighbours in accuracy
            textcoords="offset points",
            ha="center",
            fontsize=9,
            arrowprops={"arrowstyle": "-", "color": "#9aa4b2"},
        )
    dense = next(c for c in candidates if c.name == DENSE)
    floor = dense.val_top1 * 100 - budget
    axes.axhline(floor, color="#d1242f", linestyle="--", linewidth=1, label=f"{DENSE} less {budget:g} points")
    accuracies = [floor, *(c.val_top1 * 100 for c in candidates)]
    margin = 0.5 + (max(accuracies) - min(accuracies)) * 0.4
    axes.set_ylim(min(accuracies) - margin, max(accuracies) + margin)
    axes.set_xlim(0, max(c.cost_ms for c in candidates) * 1.25)
    axes.set(xlabel="CPU ms per image, one thread", ylabel="top-1 on the validation split, %")
    axes.set_title(f"Ships: {choice.name}")
    axes.legend(loc="lower right")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
