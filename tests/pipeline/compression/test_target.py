"""A target is reached with the smallest share of channels that does it, or what can be reached is said."""

from pathlib import Path

import pytest

from pipeline.compression.macs import count_macs
from pipeline.compression.prune import Rule, cut, going, judge, macs_after
from pipeline.compression.target import COST_GRID, ratio_for_cost, ratio_for_macs, remembered, smallest
from pipeline.errors import PipelineError
from pipeline.models import Classifier
from tests.pipeline.compression.networks import random_model


@pytest.mark.parametrize(("scope", "round_to"), [("uniform", 8), ("global", 8), ("global", 4)])
def test_sixty_percent_of_the_macs_go(scope: str, round_to: int) -> None:
    dense = random_model(size=32)
    rule = Rule(round_to, "l2", scope)
    judged = judge(dense, rule=rule)
    ratio = ratio_for_macs(judged, share=0.6, dense_macs=count_macs(dense), rule=rule)
    chosen = going(judged, ratio=ratio, rule=rule)
    foretold = macs_after(judged, chosen)
    less = macs_after(judged, going(judged, ratio=ratio - 0.01, rule=rule))
    assert less > 0.4 * count_macs(dense)
    pruned = cut(dense, judged, chosen)
    assert count_macs(pruned) == foretold
    assert 0.36 < foretold / count_macs(dense) <= 0.4


@pytest.mark.parametrize("name", ["mobilenet_v3_small", "resnext50_32x4d", "squeezenet1_1"])
def test_macs_are_foretold_exactly_without_cutting(name: str) -> None:
    dense = random_model(name, 64)
    rule = Rule(8, "l1", "global")
    judged = judge(dense, rule=rule)
    chosen = going(judged, ratio=0.4, rule=rule)
    foretold = macs_after(judged, chosen)
    assert count_macs(cut(dense, judged, chosen)) == foretold


def test_macs_out_of_reach_say_what_can_be_reached() -> None:
    dense = random_model(channels=1)
    rule = Rule(16, "l2", "uniform")
    with pytest.raises(PipelineError, match=r"ratio = 0\.99 of target 'macs' cannot be reached: at most 0\.8\d can go"):
        ratio_for_macs(judge(dense, rule=rule), share=0.99, dense_macs=count_macs(dense), rule=rule)


def test_search_takes_the_first_value_that_suffices() -> None:
    assert smallest(lambda x: x, grid=(0.1, 0.2, 0.3, 0.4), share=0.25, of="macs") == 0.3


def test_cost_is_that_of_exported_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is replaced by the size of the network, so that the search itself is what is tested."""
    asked: list[float] = []

    def pruned(ratio: float) -> Classifier:
        asked.append(ratio)
        return random_model("lenet", channels=1)

    monkeypatch.setattr("pipeline.compression.target.cost_gain", lambda *_: 1 / (1 - asked[-1]))
    assert ratio_for_cost(random_model("lenet", channels=1), pruned, share=0.62) == 0.65
    assert set(asked) <= set(COST_GRID)
    assert len(asked) <= 5


def test_measured_share_is_found_once_and_then_remembered(tmp_path: Path) -> None:
    path = tmp_path / "prune-1" / "ratio.json"
    assert [remembered(path, iter([0.35, 0.4]).__next__) for _ in range(2)] == [0.35, 0.35]
