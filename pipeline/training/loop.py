"""The training loop: one for training and for recovery after pruning, on any parallel plan.

Shape legend: B images of a batch, H height, W width, C channels, K classes.
"""

import math
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.errors import PipelineError
from pipeline.loader import Batch, Images, Sampling, shard, steps_per_epoch, training_batches
from pipeline.models import Classifier
from pipeline.training.checkpoint import load_checkpoint, save_checkpoint
from pipeline.training.group import Group, average_buffers, summed
from pipeline.training.optim import learning_rate
from pipeline.training.parallel import Plan
from pipeline.training.telemetry import Telemetry

EVALUATION_BATCH = 256


@dataclass(frozen=True)
class Schedule:
    """How long to train and how fast to learn."""

    epochs: int
    lr: float
    kind: str  # cosine, constant
    warmup_epochs: float
    checkpoint_steps: int

    def rate(self, step: int, *, steps_per_epoch: int) -> float:
        """Return the learning rate of `step`, counted from the start of training."""
        return learning_rate(
            step,
            peak=self.lr,
            schedule=self.kind,
            warmup_steps=round(self.warmup_epochs * steps_per_epoch),
            total_steps=self.epochs * steps_per_epoch,
        )


@dataclass(frozen=True)
class Score:
    """Evaluation over a split, every image counted once."""

    count: int
    correct: int
    loss: float

    @property
    def top1(self) -> float:
        """Return the share of right answers, in [0, 1]."""
        return self.correct / self.count


@dataclass(frozen=True)
class LabelObjective:
    """Cross-entropy against the labels."""

    label_smoothing: float = 0.0

    def __call__(self, model: nn.Module, images_BHWC: Tensor, labels_B: Tensor) -> Tensor:
        """Return the loss of each image [B]."""
        return F.cross_entropy(model(images_BHWC), labels_B, reduction="none", label_smoothing=self.label_smoothing)


def fit(
    plan: Plan,
    optimizer: torch.optim.Optimizer,
    images: Images,
    validation: Images,
    *,
    sampling: Sampling,
    schedule: Schedule,
    group: Group,
    resume: Path,
    telemetry: Path,
    title: str,
) -> None:
    """Train in place, from the newest checkpoint in `resume` if there is one.

    Raises `PipelineError` on every process together when the loss is no longer finite.
    """
    per_epoch = steps_per_epoch(len(images), sampling.batch_size)
    total = schedule.epochs * per_epoch
    first = load_checkpoint(resume, plan.model, optimizer)
    batches = training_batches(
        images, sampling, first_step=first, last_step=total, rank=group.rank, world_size=group.world_size
    )
    running, steps = 0.0, 0
    with ExitStack() as stack:
        log = None
        if group.leads:
            log = stack.enter_context(
                Telemetry(telemetry, title=title, first_step=first, total_steps=total, steps_per_epoch=per_epoch)
            )
        for batch in batches:
            rate = schedule.rate(batch.step, steps_per_epoch=per_epoch)
            running += _step(plan, optimizer, batch, rate=rate, seed=sampling.seed, group=group)
            done, steps = batch.step + 1, steps + 1
            if log:
                log.step(batch.global_size)
            if done % per_epoch == 0 or done % schedule.checkpoint_steps == 0:
                average_buffers(plan.model.net, group=group)
            if done % per_epoch == 0:
                score = evaluate(plan.model, validation, group=group)
                if log:
                    log.epoch(done // per_epoch, step=done, loss=running / steps, val_top1=score.top1, lr=rate)
                running, steps = 0.0, 0
            if done % schedule.checkpoint_steps == 0 and done < total:
                save_checkpoint(resume, plan.model, optimizer, step=done, group=group)


def _step(plan: Plan, optimizer: torch.optim.Optimizer, batch: Batch, *, rate: float, seed: int, group: Group) -> float:
    """Take one step and return the loss over the global batch."""
    # Dropout draws from a generator that depends on nothing but this, so that resuming repeats it.
    torch.manual_seed(hash((seed, batch.step, group.rank)))
    plan.model.train()
    for parameters in optimizer.param_groups:
        parameters["lr"] = rate
    optimizer.zero_grad(set_to_none=True)
    images = torch.from_numpy(batch.images_BHWC).to(group.device)
    labels = torch.from_numpy(batch.labels_B).to(group.device)
    share = plan.forward_backward(images, labels, global_size=batch.global_size)
    (loss,) = summed(group, float(share))
    if not math.isfinite(loss):
        raise PipelineError(
            f"the loss is {loss} at step {batch.step} (process {group.rank} had images "
            f"{batch.positions[:8].tolist()} ...); lower train.lr or look at the images",
            exit_status=1,
        )
    optimizer.step()
    return loss


@torch.no_grad()
def evaluate(model: Classifier, images: Images, *, group: Group) -> Score:
    """Evaluate over all processes; each image is seen by exactly one of them."""
    model.eval()
    mine = shard(np.arange(len(images)), rank=group.rank, world_size=group.world_size)
    correct, loss = 0, 0.0
    for start in range(0, len(mine), EVALUATION_BATCH):
        part = mine[start : start + EVALUATION_BATCH]
        logits = model(torch.from_numpy(images.batch(part)).to(group.device))
        labels = torch.from_numpy(images.split.labels[part]).to(group.device)
        correct += int((logits.argmax(-1) == labels).sum())
        loss += float(F.cross_entropy(logits, labels, reduction="sum"))
    all_correct, all_loss, count = summed(group, correct, loss, len(mine))
    if not math.isfinite(all_loss):
        raise PipelineError(
            "the trained weights give a loss that is not finite; lower the learning rate", exit_status=1
        )
    return Score(int(count), int(all_correct), all_loss / count)
