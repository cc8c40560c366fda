"""The process group: who this process is, which device it has, and the few collectives that the stages need."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn


@dataclass(frozen=True)
class Group:
    """One process among `world_size`."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def leads(self) -> bool:
        """Tell whether this process writes files and prints."""
        return self.rank == 0


@contextmanager
def joined(device: str) -> Iterator[Group]:
    """Join the group that torchrun describes in the environment: NCCL between GPUs, gloo between CPUs."""
    local_rank = int(os.environ["LOCAL_RANK"])
    place = torch.device("cuda", local_rank) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(place)
        torch.use_deterministic_algorithms(True, warn_only=True)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        yield Group(dist.get_rank(), dist.get_world_size(), place)
    finally:
        dist.destroy_process_group()


def summed(group: Group, *values: float) -> list[float]:
    """Return each value summed over all processes."""
    total = torch.tensor(values, dtype=torch.float64, device=group.device)
    dist.all_reduce(total)
    return [float(value) for value in total.tolist()]


@torch.no_grad()
def average_buffers(net: nn.Module, *, group: Group) -> None:
    """Make the floating-point buffers of `net` equal everywhere: their mean over processes.

    A running average is linear in what it averages, so BatchNorm gets the mean over processes of the means and
    variances that each has seen within its own parts of the batches, whenever this is called.
    """
    for buffer in net.buffers():
        if buffer.is_floating_point():
            dist.all_reduce(buffer)
            buffer /= group.world_size
