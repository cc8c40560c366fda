"""Rounds are added while noise leaves the choice open; differences on test images come with a paired interval."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

import pipeline.evaluate
from pipeline.evaluate import Candidate, compare_answers, measure_candidates, stability
from pipeline.measure import Cost
from tests.pipeline.rows import DENSE, row


def cheapest(candidates: Sequence[Candidate]) -> str:
    return max(candidates, key=lambda c: c.speedup).name


def costs(spread: float, *, rounds: int = 50) -> dict[str, Cost]:
    """Return an fp32 of 1 ms and a candidate of 0.95 ms, the latter with noise."""
    noise = np.random.default_rng(0).normal(0, spread, rounds)
    return {"fp32": Cost(np.ones(rounds), 0), "pruned": Cost(0.95 * np.exp(noise), 0)}


def test_choice_is_stable_when_the_gap_is_wider_than_the_noise() -> None:
    rows = [DENSE, row("pruned", 0.99, 1 / 0.95)]
    assert stability(rows, costs(0.01), rule=cheapest) == 1.0
    assert 0.5 < stability(rows, costs(0.5), rule=cheapest) < 0.95


def test_bounds_move_with_the_drawn_speed_up() -> None:
    rows = [DENSE, row("pruned", 0.99, 1 / 0.95, low=0.999, high=1.1)]

    def proven(candidates: Sequence[Candidate]) -> str:
        return "pruned" if candidates[1].speedup_low > 1 else "fp32"

    assert stability(rows, costs(0.05), rule=proven) < 0.9


class Noise:
    """Stands in for `measure_interleaved`: fp32 and pruned cost the same, give or take `spread`."""

    def __init__(self, spread: float) -> None:
        self.spread, self.series = spread, 0

    def __call__(
        self, calls: Mapping[str, Callable[[], object]], *, rounds: int, seed: int, clock: object
    ) -> dict[str, Cost]:
        self.series += 1
        draw = np.random.default_rng(seed).normal(0, self.spread, (2, rounds))
        steady = {"fp32": 1.0, "pruned": 0.8}
        return {n: Cost(steady[n] * np.exp(draw[i]), 10.0 * self.series) for i, n in enumerate(calls)}


@pytest.mark.parametrize(("spread", "series"), [(0.01, 1), (20.0, 8)])
def test_noisy_machine_gets_more_rounds_and_a_quiet_one_does_not(
    spread: float, series: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    noise = Noise(spread)
    monkeypatch.setattr(pipeline.evaluate, "measure_interleaved", noise)
    monkeypatch.setattr(pipeline.evaluate, "open_session", lambda path, *, provider: path)
    monkeypatch.setattr(pipeline.evaluate, "right_answers", lambda *_: np.ones(4))
    monkeypatch.setattr(pipeline.evaluate, "count_parameters", lambda _: (1, 1))
    graphs = {name: tmp_path / name for name in ("pruned", "fp32")}
    for path in graphs.values():
        path.write_bytes(b"12345")

    class Four:
        def __len__(self) -> int:
            return 4

        def batch(self, positions: object) -> object:
            return positions

    measured = measure_candidates(graphs, Four(), batch_size=2, rounds=10, rule=cheapest)  # type: ignore[arg-type]
    assert noise.series == series
    assert measured.rounds == 10 * series
    dense, pruned = measured.candidates  # fp32 first, whatever the order in the manifest
    assert (dense.name, dense.val_top1, dense.size_bytes) == ("fp32", 1.0, 5)
    assert pruned.first_call_ms == 10.0  # of the first series, not of a later one
    if series == 1:
        assert measured.settled == 1.0
        assert pruned.cost_ms == pytest.approx(0.4, rel=0.05)  # of one image: two are answered in a call


def test_interval_of_the_difference_is_the_published_formula() -> None:
    # n = 100, b = 3, c = 7: (3.5 - 7.5)/102 +- 1.96 sqrt(11 - 16/102)/102
    dense, chosen = np.ones(100, bool), np.ones(100, bool)
    dense[:3], chosen[3:10] = False, False
    found = compare_answers(dense, chosen)
    assert (found.images, found.won, found.lost) == (100, 3, 7)
    assert (found.dense_top1, found.top1) == (0.97, 0.93)
    assert found.difference == pytest.approx(-4.0)
    assert found.difference_low == pytest.approx(-10.249, abs=0.001)
    assert found.difference_high == pytest.approx(2.406, abs=0.001)


def test_answers_that_are_all_alike_still_leave_doubt() -> None:
    found = compare_answers(np.ones(100, bool), np.ones(100, bool))
    assert found.difference == 0
    assert found.difference_high == pytest.approx(1.92, abs=0.01)


def test_interval_holds_the_true_difference_19_times_of_20() -> None:
    draw = np.random.default_rng(0)
    held = 0
    for _ in range(1000):
        outcome = draw.choice(4, 400, p=[0.90, 0.03, 0.05, 0.02])  # both, only chosen, only dense, neither
        found = compare_answers((outcome == 0) | (outcome == 2), (outcome == 0) | (outcome == 1))
        held += found.difference_low <= -2.0 <= found.difference_high
    assert 930 <= held <= 970
