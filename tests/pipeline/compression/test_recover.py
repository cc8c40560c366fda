"""Pruning in steps: each step goes on from what the one before saved, so a kill at any instant changes no byte."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import pipeline.compression.recover
from pipeline.compression.distill import DistillObjective
from pipeline.compression.importance import gradients
from pipeline.compression.macs import count_macs
from pipeline.compression.rebuild import rebuild
from pipeline.compression.recover import Splits, prune_and_recover, pruning_facts, split_epochs
from pipeline.compression.sparsity import sparsity_facts
from pipeline.config import Recipe, load_recipe
from pipeline.errors import PipelineError
from pipeline.models import Classifier, ModelSpec
from pipeline.stage import Context
from pipeline.training.group import Group
from pipeline.training.loop import fit
from tests.pipeline.compression.networks import random_model
from tests.pipeline.stripes import SIZE


def recipe(**prune: object) -> Recipe:
    overrides = ["--model.name=lenet", "--train.batch_size=5", "--train.checkpoint_steps=3"]
    overrides += ["--compress.recover.epochs=3", "--data.augment="]
    return load_recipe("digits", [*overrides, *(f"--compress.prune.{name}={value}" for name, value in prune.items())])


def context(folder: Path, chosen: Recipe) -> Context:
    return Context(chosen, None, folder, folder / "resume", folder / "cache", folder / "runs")


def recovered(folder: Path, chosen: Recipe, splits: Splits, group: Group) -> Classifier:
    dense = random_model("lenet", SIZE, channels=1)
    return prune_and_recover(dense, splits, context=context(folder, chosen), group=group)


def same(first: Classifier, second: Classifier) -> bool:
    states = (first.net.state_dict(), second.net.state_dict())
    return first.spec == second.spec and all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def killed(monkeypatch: pytest.MonkeyPatch, name: str, *, at: int) -> None:
    """Make the call number `at` of a function in the module fail, as a kill would end it."""
    function: Callable[..., Any] = getattr(pipeline.compression.recover, name)
    calls: list[None] = []

    def run(*args: object, **options: object) -> object:
        calls.append(None)
        if len(calls) == at:
            raise KeyboardInterrupt
        return function(*args, **options)

    monkeypatch.setattr(pipeline.compression.recover, name, run)


def test_steps_end_at_the_widths_that_one_step_gives(tmp_path: Path, splits: Splits, group: Group) -> None:
    once = recovered(tmp_path / "1", recipe(round_to=1), splits, group)
    thrice = recovered(tmp_path / "3", recipe(round_to=1, steps=3), splits, group)
    assert thrice.spec == once.spec
    assert thrice.net.state_dict()["conv2.weight"].shape == (10, 5, 5, 5)
    assert not same(once, thrice)


def test_widths_shrink_from_step_to_step(tmp_path: Path, splits: Splits, group: Group) -> None:
    recovered(tmp_path, recipe(round_to=1, steps=3), splits, group)
    folders = [tmp_path / "resume" / f"prune-{step}" for step in (1, 2, 3)]
    widths = [load_file(folder / "pruned.safetensors")["conv2.weight"].shape[0] for folder in folders]
    assert widths == [17, 13, 10]


@pytest.mark.parametrize(("function", "at"), [("fit", 2), ("_save", 2), ("_load", 3)])
def test_killed_between_any_two_steps_it_ends_in_the_same_bytes(
    tmp_path: Path, splits: Splits, group: Group, monkeypatch: pytest.MonkeyPatch, function: str, at: int
) -> None:
    chosen = recipe(round_to=1, steps=3, sparsity=0.5)
    expected = recovered(tmp_path / "whole", chosen, splits, group)
    with monkeypatch.context() as patch:
        killed(patch, function, at=at)
        with pytest.raises(KeyboardInterrupt):
            recovered(tmp_path / "killed", chosen, splits, group)
    assert same(recovered(tmp_path / "killed", chosen, splits, group), expected)


def test_blocks_go_in_steps_and_channels_only_for_what_they_leave(tmp_path: Path, splits: Splits, group: Group) -> None:
    """Two of seven blocks are gone after the first step, four after the second; with them most of the share."""
    chosen = recipe(round_to=8, blocks=4 / 7, target="macs", ratio=0.4, steps=2)
    dense = random_model("resnet20", SIZE, channels=1)
    pruned = prune_and_recover(dense, splits, context=context(tmp_path, chosen), group=group)
    first = rebuild(ModelSpec.model_validate_json((tmp_path / "resume" / "prune-1" / "spec.json").read_text()))
    assert [len(model.spec.removed) for model in (first, pruned)] == [2, 4]
    assert set(first.spec.removed) < set(pruned.spec.removed)
    assert first.spec.widths == {}  # 20 % were asked of the first step, and its blocks are more
    facts = pruning_facts(dense, pruned, chosen.compress.prune)
    assert facts["removed"] == pruned.spec.removed
    assert facts["macs_gone"] >= 0.4


def test_killed_while_it_trains_it_ends_in_the_same_bytes(
    tmp_path: Path, splits: Splits, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = recipe(round_to=1, importance="taylor", sparsity=0.5)
    expected = recovered(tmp_path / "whole", chosen, splits, group)
    steps: list[None] = []

    class Stopping(DistillObjective):
        def __call__(self, *args: Any) -> torch.Tensor:
            steps.append(None)
            if len(steps) == 5:  # two steps after a checkpoint
                raise KeyboardInterrupt
            return super().__call__(*args)

    with monkeypatch.context() as patch:
        patch.setattr(pipeline.compression.recover, "DistillObjective", Stopping)
        with pytest.raises(KeyboardInterrupt):
            recovered(tmp_path / "killed", chosen, splits, group)
    assert (tmp_path / "killed" / "resume" / "prune-1" / "step-3").is_dir()
    assert same(recovered(tmp_path / "killed", chosen, splits, group), expected)


def test_measured_ratio_is_kept_for_a_run_that_was_killed(
    tmp_path: Path, splits: Splits, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = iter([0.5, 0.9])
    monkeypatch.setattr(pipeline.compression.recover, "ratio_for_cost", lambda *_args, **_: next(measured))
    chosen = recipe(round_to=1, target="cost", ratio=0.4)
    with monkeypatch.context() as patch:
        killed(patch, "fit", at=1)
        with pytest.raises(KeyboardInterrupt):
            recovered(tmp_path, chosen, splits, group)
    assert recovered(tmp_path, chosen, splits, group).net.state_dict()["conv2.weight"].shape[0] == 10


def test_macs_are_a_share_of_the_dense_network_in_every_step(tmp_path: Path, splits: Splits, group: Group) -> None:
    chosen = recipe(round_to=1, target="macs", ratio=0.6, steps=2)
    pruned = recovered(tmp_path, chosen, splits, group)
    dense = random_model("lenet", SIZE, channels=1)
    facts = pruning_facts(dense, pruned, chosen.compress.prune)
    assert 0.6 <= facts["macs_gone"] < 0.7
    assert facts["macs_gone"] == 1 - count_macs(pruned) / count_macs(dense)
    assert facts["asked"] == {"blocks": 0.0, "ratio": 0.6, "target": "macs", "sparsity": 0.0}
    assert facts["removed"] == ()


def test_sparsity_without_pruning_keeps_every_width(tmp_path: Path, splits: Splits, group: Group) -> None:
    pruned = recovered(tmp_path, recipe(ratio=0, sparsity=0.8), splits, group)
    assert pruned.spec.widths == {}
    assert sparsity_facts(pruned)["sparsity"] == pytest.approx(0.8, abs=0.001)


def test_gradients_are_those_of_the_mean_loss(splits: Splits, group: Group) -> None:
    model = random_model("lenet", SIZE, channels=1)
    found = gradients(model, splits.train, group=group)
    logits = model(torch.from_numpy(splits.train.batch(np.arange(20))))
    labels = torch.from_numpy(splits.train.split.labels)
    torch.autograd.backward(torch.nn.functional.cross_entropy(logits, labels))
    for name, parameter in model.net.named_parameters():
        assert parameter.grad is not None
        assert torch.allclose(found[name], parameter.grad, atol=1e-6)


def test_epochs_are_split_over_the_steps() -> None:
    assert split_epochs(10, 3) == [3, 3, 4]
    assert split_epochs(2, 1) == [2]


def test_more_steps_than_epochs_are_refused() -> None:
    with pytest.raises(PipelineError, match=r"prune\.steps = 3, but compress\.recover\.epochs = 2"):
        split_epochs(2, 3)


def test_each_step_sees_the_images_in_another_order(
    tmp_path: Path, splits: Splits, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[int] = []

    def noting(*args: Any, **options: Any) -> None:
        seeds.append(options["sampling"].seed)
        fit(*args, **options)

    monkeypatch.setattr(pipeline.compression.recover, "fit", noting)
    recovered(tmp_path, recipe(round_to=1, steps=3), splits, group)
    assert seeds == [0, 1, 2]
