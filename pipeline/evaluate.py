"""What a candidate is worth on this machine: right answers, bytes, parameters, and time in interleaved rounds.

Shape legend: N images, R rounds, D draws.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt
from pathlib import Path

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from pipeline.compression.candidates import DENSE
from pipeline.graph import count_parameters
from pipeline.loader import Images
from pipeline.measure import Cost, measure_interleaved, ratio
from pipeline.session import open_session, probabilities

EVALUATION_BATCH = 64
SERIES = 8  # of `rounds` rounds each, at most: a noisy machine gets more of them
SETTLED = 0.998  # share of draws that must give the same choice
DRAWS = 1000
NORMAL_95 = 1.959964
CLOCKS = {True: time.process_time, False: time.perf_counter}  # on the CPU, on a GPU


@dataclass(frozen=True)
class Candidate:
    """One row of the table."""

    name: str
    val_top1: float
    val_images: int
    size_bytes: int  # of the .onnx file
    parameters: int  # weights and biases in the graph, normalisation folded in
    nonzero_parameters: int
    cost_ms: float  # milliseconds for one image: CPU time, or time until a GPU's answer is back
    cost_spread_ms: float  # between the quartiles
    speedup: float  # over fp32, paired by round
    speedup_low: float  # 95 % interval
    speedup_high: float
    first_call_ms: float  # milliseconds of the first call, which is not in `cost_ms`


@dataclass(frozen=True)
class Measured:
    """The table, and how it came about."""

    candidates: tuple[Candidate, ...]
    rounds: int  # of each candidate
    settled: float  # share of draws of the rounds that give the same choice


@dataclass(frozen=True)
class Comparison:
    """The same images answered by fp32 and by the chosen candidate. Differences are chosen less fp32, in points."""

    images: int
    dense_top1: float
    top1: float
    won: int  # right by the chosen one only
    lost: int  # right by fp32 only
    difference: float
    difference_low: float  # 95 % interval
    difference_high: float


Rule = Callable[[Sequence[Candidate]], str]


def measure_candidates(
    graphs: Mapping[str, Path],
    validation: Images,
    *,
    batch_size: int,
    rounds: int,
    rule: Rule,
    provider: str = "cpu",
) -> Measured:
    """Return a row for every graph: accuracy on all validation images, cost in interleaved rounds.

    On a GPU the cost is the time until the answers are back, whoever else uses the GPU.
    Rounds are added, up to `SERIES` times `rounds`, while noise leaves open which candidate `rule` picks.
    """
    sessions = {name: open_session(path, provider=provider) for name, path in graphs.items()}
    top1 = {name: float(right_answers(session, validation).mean()) for name, session in sessions.items()}
    sample = validation.batch(np.arange(batch_size) % len(validation))
    calls = {name: partial(probabilities, session, sample) for name, session in sessions.items()}
    costs: dict[str, Cost] = {}
    for series in range(SERIES):
        more = measure_interleaved(calls, rounds=rounds, seed=series, clock=CLOCKS[provider == "cpu"])
        costs = _joined(costs, more)
        rows = [
            _row(name, path, top1[name], len(validation), costs, batch_size=batch_size) for name, path in graphs.items()
        ]
        settled = stability(rows, costs, rule=rule)
        if settled >= SETTLED:
            break
    rows.sort(key=lambda c: (c.name != DENSE, c.speedup))
    return Measured(tuple(rows), len(costs[DENSE].rounds_ms), settled)


def stability(candidates: Sequence[Candidate], costs: Mapping[str, Cost], *, rule: Rule, seed: int = 0) -> float:
    """Return the share of bootstrap draws of the rounds in which `rule` picks what it picks from all of them."""
    rounds = len(costs[DENSE].rounds_ms)
    draws_DR = np.random.default_rng(seed).integers(0, rounds, (DRAWS, rounds))
    speedups = {
        name: np.median((costs[DENSE].rounds_ms / cost.rounds_ms)[draws_DR], axis=1) for name, cost in costs.items()
    }
    picked = rule(candidates)
    again = (
        rule([_as_fast(c, speedup=float(speedups[c.name][draw])) for c in candidates]) == picked
        for draw in range(DRAWS)
    )
    return sum(again) / DRAWS


def _as_fast(candidate: Candidate, *, speedup: float) -> Candidate:
    """Return the candidate with another speed-up and an interval of the same relative width."""
    shift = speedup / candidate.speedup
    low, high = candidate.speedup_low * shift, candidate.speedup_high * shift
    return replace(candidate, speedup=speedup, speedup_low=low, speedup_high=high)


def _row(name: str, path: Path, top1: float, images: int, costs: Mapping[str, Cost], *, batch_size: int) -> Candidate:
    cost, gain = costs[name], ratio(costs[DENSE], costs[name])
    parameters, nonzero = count_parameters(path)
    return Candidate(
        name=name,
        val_top1=top1,
        val_images=images,
        size_bytes=path.stat().st_size,
        parameters=parameters,
        nonzero_parameters=nonzero,
        cost_ms=cost.median_ms / batch_size,
        cost_spread_ms=cost.spread_ms / batch_size,
        speedup=gain.median,
        speedup_low=gain.low,
        speedup_high=gain.high,
        first_call_ms=cost.first_call_ms,
    )


def _joined(before: Mapping[str, Cost], more: Mapping[str, Cost]) -> dict[str, Cost]:
    """Append rounds; the first call of all is the one that was first."""
    if not before:
        return dict(more)
    return {
        name: Cost(np.concatenate([cost.rounds_ms, more[name].rounds_ms]), cost.first_call_ms)
        for name, cost in before.items()
    }


def right_answers(session: onnxruntime.InferenceSession, images: Images) -> NDArray[np.bool_]:
    """Return bool [N]: whether the most probable class is the right one."""
    answers = np.concatenate([probabilities(session, pixels).argmax(1) for pixels in images.batches(EVALUATION_BATCH)])
    return np.asarray(answers == images.split.labels)


def compare_answers(dense_N: NDArray[np.bool_], chosen_N: NDArray[np.bool_]) -> Comparison:
    """Compare right answers to the same images, with the 95 % interval of the difference.

    Agresti and Min (2005), Simple improved confidence intervals for comparing matched proportions: half an image is
    added to each cell of the 2x2 table, then Wald's interval is taken. With b only right by the chosen one, c only by
    fp32 and n images, so increased: (b - c)/n +- 1.96 sqrt(b + c - (b - c)^2/n)/n.
    """
    images, won, lost = len(dense_N), int((chosen_N & ~dense_N).sum()), int((dense_N & ~chosen_N).sum())
    b, c, n = won + 0.5, lost + 0.5, images + 2
    centre, half = (b - c) / n, NORMAL_95 * sqrt(b + c - (b - c) ** 2 / n) / n
    return Comparison(
        images=images,
        dense_top1=float(dense_N.mean()),
        top1=float(chosen_N.mean()),
        won=won,
        lost=lost,
        difference=(won - lost) / images * 100,
        difference_low=(centre - half) * 100,
        difference_high=(centre + half) * 100,
    )


def compare_graphs(dense: Path, chosen: Path, images: Images, *, provider: str = "cpu") -> Comparison:
    """Answer the images with both graphs."""
    dense_N, chosen_N = (right_answers(open_session(path, provider=provider), images) for path in (dense, chosen))
    return compare_answers(dense_N, chosen_N)
