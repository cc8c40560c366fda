"""Paired measurement: what calls cost in CPU time, all contenders interleaved in one run, as ratios with an interval.

Wall time on a shared machine says more about the neighbours than about the code; CPU time in interleaved rounds does
not.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BLOCK_S = 0.02  # seconds of one timed block: well above the clock's and the scheduler's grain
WARM_UP_CALLS = 3
RESAMPLES = 2000


@dataclass(frozen=True)
class Cost:
    """What one contender costs. `rounds_ms` has one value for each round, in the order of the rounds."""

    rounds_ms: NDArray[np.float64]
    first_call_ms: float

    @property
    def median_ms(self) -> float:
        """Return the median milliseconds of a call."""
        return float(np.median(self.rounds_ms))

    @property
    def spread_ms(self) -> float:
        """Return the distance between the quartiles."""
        low, high = np.percentile(self.rounds_ms, [25, 75])
        return float(high - low)


@dataclass(frozen=True)
class Ratio:
    """How many times cheaper one contender is than another, with a 95 % bootstrap interval of the median."""

    median: float
    low: float
    high: float


def measure_interleaved(
    contenders: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    seed: int = 0,
    clock: Callable[[], float] = time.process_time,
) -> dict[str, Cost]:
    """Measure every contender in every round, in a random order within it. Warm-up calls are not counted.

    `clock` returns seconds: CPU time, or `time.perf_counter` for calls that wait for a GPU.
    """
    generator = np.random.default_rng(seed)
    first: dict[str, float] = {}
    calls: dict[str, int] = {}
    for name, call in contenders.items():
        first[name] = _seconds(call, 1, clock) * 1000
        _seconds(call, WARM_UP_CALLS, clock)
        calls[name] = max(1, round(BLOCK_S / max(_seconds(call, WARM_UP_CALLS, clock) / WARM_UP_CALLS, 1e-7)))
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name in generator.permutation(list(contenders)):
            taken[name].append(_seconds(contenders[name], calls[name], clock) / calls[name] * 1000)
    return {name: Cost(np.array(values), first[name]) for name, values in taken.items()}


def ratio(baseline: Cost, candidate: Cost, *, seed: int = 0) -> Ratio:
    """Return baseline / candidate, paired by round: above 1 the candidate is cheaper."""
    pairs = baseline.rounds_ms / candidate.rounds_ms
    draws = np.random.default_rng(seed).integers(0, len(pairs), (RESAMPLES, len(pairs)))
    low, high = np.percentile(np.median(pairs[draws], axis=1), [2.5, 97.5])
    return Ratio(float(np.median(pairs)), float(low), float(high))


def _seconds(call: Callable[[], object], times: int, clock: Callable[[], float]) -> float:
    start = clock()
    for _ in range(times):
        call()
    return clock() - start
