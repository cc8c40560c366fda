"""Costs are paired by round, and a ratio comes with an interval."""

import time

import numpy as np

from pipeline.measure import Cost, measure_interleaved, ratio


def spin(times: int) -> None:
    sum(range(times))


def test_work_that_is_ten_times_larger_is_measured_as_more_costly() -> None:
    costs = measure_interleaved({"small": lambda: spin(2_000), "large": lambda: spin(20_000)}, rounds=5)
    assert ratio(costs["large"], costs["small"]).low > 3


def test_every_contender_has_a_value_for_every_round() -> None:
    costs = measure_interleaved({"a": lambda: spin(10), "b": lambda: spin(10)}, rounds=4)
    assert [len(cost.rounds_ms) for cost in costs.values()] == [4, 4]
    assert all(cost.first_call_ms > 0 for cost in costs.values())


def test_clock_decides_what_is_measured() -> None:
    """A call that waits for a GPU costs no CPU time; here it waits for nothing."""

    def wait() -> None:
        time.sleep(0.01)

    (waited,) = measure_interleaved({"wait": wait}, rounds=2, clock=time.perf_counter).values()
    assert waited.median_ms >= 10
    assert waited.first_call_ms >= 10


def test_ratio_is_paired_so_that_a_slow_machine_cancels() -> None:
    slow_then_fast = np.array([10.0, 10, 1, 1])
    gain = ratio(Cost(slow_then_fast, 0), Cost(slow_then_fast / 2, 0))
    assert (gain.median, gain.low, gain.high) == (2, 2, 2)


def test_interval_widens_with_the_spread() -> None:
    steady = ratio(Cost(np.full(15, 2.0), 0), Cost(np.full(15, 1.0), 0))
    noisy = ratio(Cost(np.linspace(1, 3, 15), 0), Cost(np.full(15, 1.0), 0))
    assert steady.high - steady.low == 0
    assert noisy.high - noisy.low > 0.3
