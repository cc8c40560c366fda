"""Schedules by value, and what is not decayed."""

import pytest
import torch

from pipeline.training.optim import build_optimizer, learning_rate


@pytest.mark.parametrize(("step", "rate"), [(0, 0.25), (3, 1.0), (4, 1.0), (8, 0.5), (11, 0.5 * (1 - 0.9238795))])
def test_cosine_warms_up_and_falls_to_nothing(step: int, rate: float) -> None:
    assert learning_rate(step, peak=1, schedule="cosine", warmup_steps=4, total_steps=12) == pytest.approx(
        rate, abs=1e-6
    )


def test_constant_schedule_stays() -> None:
    assert [learning_rate(s, peak=2, schedule="constant", warmup_steps=0, total_steps=9) for s in (0, 8)] == [2, 2]


@pytest.mark.parametrize(
    ("name", "kind"), [("sgd", torch.optim.SGD), ("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW)]
)
def test_optimizer_is_the_one_that_was_named(name: str, kind: type) -> None:
    made = build_optimizer(torch.nn.Linear(2, 2), name=name, lr=0.1, momentum=0.9, weight_decay=0.01)
    assert type(made) is kind
    assert [group["weight_decay"] for group in made.param_groups] == [0.01, 0.0]


def test_frozen_weights_are_left_to_nobody() -> None:
    layer = torch.nn.Linear(2, 2)
    layer.weight.requires_grad_(False)
    made = build_optimizer(layer, name="sgd", lr=0.1, momentum=0.9, weight_decay=0.0)
    assert [len(group["params"]) for group in made.param_groups] == [0, 1]
