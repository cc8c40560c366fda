"""Checkpoints for resuming: complete or absent, private to the stage, gone when its artifact is published."""

import re
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from pipeline.models import Classifier
from pipeline.training.group import Group

COMPLETE = re.compile(r"step-(\d+)")


def latest_step(folder: Path) -> int:
    """Return the step of the newest complete checkpoint in `folder`; 0 when there is none."""
    found = [int(match[1]) for p in folder.glob("step-*") if (match := COMPLETE.fullmatch(p.name))]
    return max(found, default=0)


def save_checkpoint(
    folder: Path, model: Classifier, optimizer: torch.optim.Optimizer, *, step: int, group: Group
) -> None:
    """Write the state after `step` steps, by all processes together; one rename makes it complete."""
    scratch, final = folder / f"step-{step}.partial", folder / f"step-{step}"
    if group.leads:
        shutil.rmtree(scratch, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    weights, moments = get_state_dict(model, optimizer)
    save({"model": weights, "optimizer": moments}, checkpoint_id=scratch)
    if group.leads:
        scratch.rename(final)
        for old in folder.glob("step-*"):
            if old != final:
                shutil.rmtree(old)
    dist.barrier()


def load_checkpoint(folder: Path, model: Classifier, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest complete checkpoint in place and return its step; 0 when there is none."""
    step = latest_step(folder)
    if step:
        weights, moments = get_state_dict(model, optimizer)
        load({"model": weights, "optimizer": moments}, checkpoint_id=folder / f"step-{step}")
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    return step
