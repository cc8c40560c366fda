"""As few layers as the budget needs are given back, the worst first."""

from collections.abc import Collection

import pytest

from pipeline.compression.sensitivity import Loss, give_back

LOSSES = [Loss(f"layer{number}", error) for number, error in enumerate([0.1, 0.9, 0.3, 0.8, 0.2, 0.7, 0.6, 0.5])]
WORST_FIRST = ["layer1", "layer3", "layer5", "layer6", "layer7", "layer2", "layer4", "layer0"]


@pytest.mark.parametrize("needed", range(1, 9))
def test_no_more_layers_than_needed_are_given_back(needed: int) -> None:
    given_back = give_back(LOSSES, holds=lambda without: len(without) >= needed)
    assert [loss.layer for loss in given_back] == WORST_FIRST[:needed]


def test_trials_grow_with_the_logarithm() -> None:
    tried: list[int] = []

    def holds(without: Collection[str]) -> bool:
        tried.append(len(without))
        return len(without) >= 200

    assert len(give_back([Loss(str(n), n) for n in range(500)], holds=holds)) == 200
    assert len(tried) < 20


def test_all_are_given_back_when_the_budget_never_holds() -> None:
    assert len(give_back(LOSSES, holds=lambda without: False)) == len(LOSSES)
