"""The choose stage: the cheapest candidate within the accuracy budget ships, and is tried once on the test split."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from pipeline.artifact import Artifact, StageResult
from pipeline.compression.candidates import DENSE, is_int8, runs_on
from pipeline.config import ChooseConfig
from pipeline.data import open_dataset, preprocessing_of
from pipeline.errors import PipelineError
from pipeline.evaluate import Candidate, Comparison, Measured, compare_graphs, measure_candidates
from pipeline.graph import as_run, census, compare_layers
from pipeline.loader import Images, open_images
from pipeline.machine import cpu_facts, library_versions
from pipeline.measure import BLOCK_S, WARM_UP_CALLS
from pipeline.report.kept import kept_in_float, reports_behind
from pipeline.report.page import write_page
from pipeline.stage import Context, data_facts

SAME_COST = 0.03  # costs closer than this are called equal, and accuracy decides
CLOCK_NAMES = {True: "process CPU time", False: "wall time until the GPU's answer is back"}
ROUNDING = 1e-12  # a candidate exactly at the budget is within it


@dataclass(frozen=True)
class Choice:
    """Which candidate ships, and why, in one sentence."""

    name: str
    reason: str


def choose(context: Context) -> StageResult:
    """Evaluate and measure every candidate, decide, publish the chosen graph as `model.onnx`, then try it on test."""
    recipe, source = context.recipe, context.parent
    dataset = open_dataset(recipe.data, cache=context.cache)
    spec = preprocessing_of(recipe.data)
    validation = open_images(dataset.val, spec, cache=context.cache)
    provider = recipe.export.provider
    graphs = {name: path for name, path in graphs_of(source).items() if runs_on(name, provider)}
    if recipe.choose.force is not None and recipe.choose.force not in graphs:
        raise PipelineError(f"choose.force = {recipe.choose.force!r} is no candidate; use one of {', '.join(graphs)}")
    measured = measure(graphs, validation, config=recipe.choose, provider=provider)
    choice = decide(measured.candidates, budget=recipe.choose.budget, force=recipe.choose.force)
    chosen = graphs[choice.name]
    (context.out / "model.onnx").write_bytes(chosen.read_bytes())
    # Nothing above has seen the test split: what is said about it has not been chosen for it.
    held_out = open_images(dataset.test, spec, cache=context.cache)
    test = compare_graphs(graphs[DENSE], chosen, held_out, provider=provider)
    unfit = [name for name in source.manifest.models if name not in graphs]
    left_out = [f"there is no candidate {name}: {provider} has no kernels for it" for name in unfit]
    sample = validation.batch(np.arange(recipe.choose.batch_size) % len(validation))
    earlier = reports_behind(source)
    report = report_of(measured, choice, test, config=recipe.choose, provider=provider) | {
        **insides({DENSE: graphs[DENSE], choice.name: chosen}, sample, provider=provider),
        "int8": is_int8(choice.name),
        "float_layers": kept_in_float(choice.name, chosen, earlier),
        "earlier_notes": [note for made in reversed(earlier) for note in made.get("notes", [])] + left_out,
    }
    write_page(report, context.out / "report" / "report.html", title=recipe.package.name)
    return StageResult(
        data=data_facts(dataset, spec),
        models={choice.name: source.manifest.models[choice.name]},
        metrics={f"{c.name}_val_top1": c.val_top1 for c in measured.candidates}
        | {f"{DENSE}_test_top1": test.dense_top1, f"{choice.name}_test_top1": test.top1},
        report=report,
    )


def insides(graphs: dict[str, Path], sample: NDArray[np.uint8], *, provider: str) -> dict[str, Any]:
    """Return what fp32 and the chosen graph are made of: layers with bytes and times, and a census of operators.

    ONNX Runtime profiles and writes optimized graphs for the CPU only; for a GPU, the files' own operators are counted.
    """
    dense, chosen = graphs[DENSE], list(graphs.values())[-1]
    if provider != "cpu":
        return {"layers": [], "operators": {name: census(onnx.load(path)) for name, path in graphs.items()}}
    return {
        "layers": [asdict(layer) for layer in compare_layers(dense, chosen, sample)],
        "operators": {name: census(as_run(path)) for name, path in graphs.items()},
    }


def graphs_of(source: Artifact) -> dict[str, Path]:
    """Return the graph of every candidate that the stage before has published."""
    return {name: source.file(f"{name}.onnx") for name in source.manifest.models}


def measure(graphs: dict[str, Path], validation: Images, *, config: ChooseConfig, provider: str = "cpu") -> Measured:
    """Measure the candidates for as long as noise leaves the choice open."""

    def rule(candidates: Sequence[Candidate]) -> str:
        return decide(candidates, budget=config.budget, force=config.force).name

    return measure_candidates(
        graphs, validation, batch_size=config.batch_size, rounds=config.rounds, rule=rule, provider=provider
    )


def decide(candidates: Sequence[Candidate], *, budget: float, force: str | None) -> Choice:
    """Return the cheapest candidate within `budget` points of the dense one's accuracy that is proven not slower.

    Costs within 3 % of the cheapest count as equal: of those the most accurate ships, then the smallest. Costs are
    compared by their speed-ups, which are paired by round: medians of different rounds would compare the neighbours.
    """
    dense = next(c for c in candidates if c.name == DENSE)
    if force is not None:
        return Choice(force, f"{force} was asked for with choose.force")
    fit = [c for c in candidates if c is dense or (_within(c, dense, budget=budget) and c.speedup_low > 1)]
    fastest = max(c.speedup for c in fit)
    equal = [c for c in fit if c.speedup * (1 + SAME_COST) >= fastest]
    best = max(equal, key=lambda c: (c.val_top1, -c.size_bytes))
    if best is dense:
        others = [_why_not(c, dense, budget=budget) for c in candidates if c is not dense]
        return Choice(DENSE, f"kept {DENSE}: {', '.join(others) or 'there is no other candidate'}")
    return Choice(
        best.name,
        f"{best.name} is the cheapest within {budget:g} points of {DENSE}: {best.speedup:.2f}x "
        f"({best.speedup_low:.2f}-{best.speedup_high:.2f}), {_change(best, dense)}",
    )


def _why_not(candidate: Candidate, dense: Candidate, *, budget: float) -> str:
    if _within(candidate, dense, budget=budget):
        return f"{candidate.name} was {candidate.speedup:.2f}x"
    return f"{candidate.name} lost {(dense.val_top1 - candidate.val_top1) * 100:.2f} points"


def verdict(candidate: Candidate, *, best: Candidate, dense: Candidate, budget: float) -> str:
    """Return what became of a candidate, in a few words."""
    said = [
        ("ships", candidate is best),
        ("the baseline", candidate is dense),
        (f"slower than {DENSE}", candidate.speedup_high < 1),
        (f"loses more than {budget:g} points", not _within(candidate, dense, budget=budget)),
        (f"not proven faster than {DENSE}", candidate.speedup_low <= 1),
        (f"dearer than {best.name}", candidate.speedup * (1 + SAME_COST) < best.speedup),
        (f"cheaper than {best.name}, which was asked for", candidate.speedup > best.speedup * (1 + SAME_COST)),
    ]
    return next((words for words, applies in said if applies), f"costs the same as {best.name}")


def _within(candidate: Candidate, dense: Candidate, *, budget: float) -> bool:
    return candidate.val_top1 >= dense.val_top1 - budget / 100 - ROUNDING


def _change(candidate: Candidate, dense: Candidate) -> str:
    points = (candidate.val_top1 - dense.val_top1) * 100
    return f"{abs(points):.2f} points {'lost' if points < 0 else 'gained'}" if points else "no point lost"


def warnings_of(choice: Choice, candidates: Sequence[Candidate], test: Comparison, *, budget: float) -> list[str]:
    """Return what must not be overlooked about what ships: each time that the artifact is used, it is said again."""
    by_name = {c.name: c for c in candidates}
    best, dense = by_name[choice.name], by_name[DENSE]
    found: list[str] = []
    if best.speedup_high < 1:
        found.append(
            f"{best.name} is SLOWER than {DENSE}: {best.speedup:.2f}x, and ships only because it was asked for"
        )
    if not _within(best, dense, budget=budget):
        found.append(
            f"{best.name} LOSES {_change(best, dense).removesuffix(' lost')} on validation images, more than {budget:g}"
        )
    if test.difference_high < -budget:
        found.append(
            f"{best.name} LOSES {-test.difference:.2f} points ({-test.difference_high:.2f}-{-test.difference_low:.2f}) "
            f"on test images, more than {budget:g}"
        )
    return [f"warning: {line}" for line in found]


def report_of(
    measured: Measured, choice: Choice, test: Comparison, *, config: ChooseConfig, provider: str = "cpu"
) -> dict[str, Any]:
    """Return the figures as plain values, with the conditions under which they were taken."""
    by_name = {c.name: c for c in measured.candidates}
    say = partial(verdict, best=by_name[choice.name], dense=by_name[DENSE], budget=config.budget)
    return {
        "choice": asdict(choice),
        "candidates": [asdict(c) | {"verdict": say(c)} for c in measured.candidates],
        "test": asdict(test),
        "notes": warnings_of(choice, measured.candidates, test, budget=config.budget),
        "conditions": {
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "cpu": cpu_facts(),
            "threads": 1,
            "batch_size": config.batch_size,
            "budget": config.budget,
            "rounds": measured.rounds,
            "settled": measured.settled,
            "provider": provider,
            "clock": f"{CLOCK_NAMES[provider == 'cpu']}; rounds of {BLOCK_S * 1000:.0f} ms for each candidate, in "
            "random order",
            "warm_up": f"the first call is reported apart, {2 * WARM_UP_CALLS} more are not counted",
            "versions": library_versions(),
        },
    }
