"""Pruning and the training after it, at once or in steps. Killed at any instant, it continues to the same bytes.

What a finished step left lies in the stage's resume folder as spec and safetensors, and every step starts from such
files, so that an interrupted run and an uninterrupted one compute the same.
"""

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.compression.blocks import removable, remove_blocks
from pipeline.compression.distill import DistillObjective
from pipeline.compression.importance import gradients
from pipeline.compression.macs import count_macs
from pipeline.compression.prune import Rule, cut, going, judge, prune
from pipeline.compression.rebuild import rebuild
from pipeline.compression.sparsity import hold_zeros, sparsify, sparsity_facts
from pipeline.compression.target import ratio_for_cost, ratio_for_macs, remembered
from pipeline.config import PruneConfig, Recipe
from pipeline.errors import PipelineError
from pipeline.loader import Images
from pipeline.models import Classifier, ModelSpec, load_weights, save_weights
from pipeline.stage import Context
from pipeline.training.group import Group
from pipeline.training.loop import Schedule, fit
from pipeline.training.stage import data_parallel, optimizer_for, sampling_of


@dataclass(frozen=True)
class Splits:
    """What recovery learns from, and what it is watched with."""

    train: Images
    validation: Images


def prune_and_recover(dense: Classifier, splits: Splits, *, context: Context, group: Group) -> Classifier:
    """Return the pruned network, recovered; runs in every process.

    With `steps` = n, step k prunes until k/n of the whole share is gone, counted from the dense network, and trains
    for its part of the epochs. Sparsity comes with the last step. Raises `PipelineError` as `prune` does, and when
    there are fewer epochs than steps.
    """
    choice = context.recipe.compress.prune
    parts = split_epochs(context.recipe.compress.recover.epochs, choice.steps)
    model = dense
    for step, epochs in enumerate(parts, start=1):
        folder = context.resume / f"prune-{step}"
        if not _finished(folder):
            pruned = narrowed(model, dense, splits.train, step=step, choice=choice, folder=folder, group=group)
            last = step == choice.steps
            zeros = sparsify(pruned.net, share=choice.sparsity) if last and choice.sparsity else {}
            _recover(pruned, dense, splits, zeros, step=step, epochs=epochs, context=context, group=group)
            if group.leads:
                _save(pruned, folder)
            dist.barrier()
        model = _load(folder)
    return model


def split_epochs(epochs: int, steps: int) -> list[int]:
    """Return the epochs of each step: equal, and what is left over goes to the last ones."""
    if epochs < steps:
        raise PipelineError(
            f"compress.prune.steps = {steps}, but compress.recover.epochs = {epochs}; every step needs one at least"
        )
    return [epochs // steps + (step >= steps - epochs % steps) for step in range(steps)]


def narrowed(
    model: Classifier,
    dense: Classifier,
    images: Images,
    *,
    step: int,
    choice: PruneConfig,
    folder: Path,
    group: Group,
) -> Classifier:
    """Return `model` without what `step` takes of it; the share of channels that a measurement gave is kept there."""
    if choice.blocks:
        share = choice.blocks * step / choice.steps
        model = remove_blocks(model, images, share=share, blocks=len(removable(dense)), group=group)
    share = choice.ratio * step / choice.steps
    if not share:
        return Classifier(model.spec, copy.deepcopy(model.net))
    rule = Rule(choice.round_to, choice.importance, choice.scope, choice.keep)
    found = gradients(model, images, group=group) if choice.importance == "taylor" else None
    model = model.cpu()

    def pruned(ratio: float) -> Classifier:
        return prune(model, ratio=ratio, rule=rule, origin=dense.spec, gradients=found)

    if choice.target == "cost":
        cpu = Classifier(dense.spec, copy.deepcopy(dense.net)).cpu()
        ratio = 0.0
        if group.leads:
            ratio = remembered(folder / "ratio.json", lambda: ratio_for_cost(cpu, pruned, share=share))
        return pruned(_from_leader(ratio, group=group))
    judged = judge(model, rule=rule, origin=dense.spec, gradients=found)
    if choice.target == "macs":
        share = ratio_for_macs(judged, share=share, dense_macs=count_macs(dense), rule=rule)
    return cut(model, judged, going(judged, ratio=share, rule=rule))


def pruning_facts(dense: Classifier, pruned: Classifier, choice: PruneConfig) -> dict[str, Any]:
    """Return what was asked for and what was reached, for the report."""
    return {
        "asked": choice.model_dump(include={"blocks", "ratio", "target", "sparsity"}),
        "macs_gone": 1 - count_macs(pruned) / count_macs(dense),
        "removed": pruned.spec.removed,
        "widths": pruned.spec.widths,
        **sparsity_facts(pruned),
    }


def _recover(
    pruned: Classifier,
    dense: Classifier,
    splits: Splits,
    zeros: dict[str, Tensor],
    *,
    step: int,
    epochs: int,
    context: Context,
    group: Group,
) -> None:
    """Train the pruned model against the labels and the dense model's answers; weights in `zeros` stay 0."""
    recipe = context.recipe
    recover, steps = recipe.compress.recover, recipe.compress.prune.steps
    teacher = dense.to(group.device).eval()
    objective = DistillObjective(teacher, weight=recover.distill, temperature=recover.temperature)
    optimizer = optimizer_for(pruned, recipe.train, lr=recover.lr)
    hold_zeros(optimizer, pruned.net, zeros)
    fit(
        data_parallel(pruned, group, objective, recipe.train),
        optimizer,
        splits.train,
        splits.validation,
        sampling=replace(sampling_of(recipe), seed=_seed(recipe, step)),
        schedule=Schedule(
            epochs=epochs,
            lr=recover.lr,
            kind="cosine",
            warmup_epochs=0,
            checkpoint_steps=recipe.train.checkpoint_steps,
        ),
        group=group,
        resume=context.resume / f"prune-{step}",
        telemetry=context.telemetry if steps == 1 else context.telemetry / f"prune-{step}",
        title="recover" if steps == 1 else f"recover {step}/{steps}",
    )


def _seed(recipe: Recipe, step: int) -> int:
    """Return another seed for each step: its epochs are counted from 0 again, and must not repeat their order."""
    return recipe.train.seed + step - 1


def _finished(folder: Path) -> bool:
    return (folder / "spec.json").is_file()


def _save(model: Classifier, folder: Path) -> None:
    """Write weights and spec; the spec comes last and by a rename, so where it is, all is."""
    folder.mkdir(parents=True, exist_ok=True)
    save_weights(model, folder / "pruned.safetensors")
    scratch = folder / "spec.partial"
    scratch.write_text(model.spec.model_dump_json())
    scratch.rename(folder / "spec.json")


def _load(folder: Path) -> Classifier:
    model = rebuild(ModelSpec.model_validate_json((folder / "spec.json").read_text()))
    return load_weights(model, folder / "pruned.safetensors").eval()


def _from_leader(value: float, *, group: Group) -> float:
    """Return the leading process's value: what is measured differs, and all must prune alike."""
    shared = torch.tensor([value], dtype=torch.float64, device=group.device)
    dist.broadcast(shared, 0)
    return float(shared)
