"""Parallel plans. Each takes its part of a batch to gradients that are equal on every process.

Shape legend: B images of this process's part, H height, W width, C channels, K classes.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pipeline.models import Classifier
from pipeline.training.group import Group

# Takes (model, images [B, H, W, C], labels [B]) to one loss for each image [B].
Objective = Callable[[nn.Module, Tensor, Tensor], Tensor]


class Plan(Protocol):
    """What the training loop needs of a way to use several processes."""

    model: Classifier

    def forward_backward(self, images_BHWC: Tensor, labels_B: Tensor, *, global_size: int) -> Tensor:
        """Add the gradients of the mean loss over all `global_size` images; return this process's share of it."""


class DataParallel:
    """DDP: every process holds the whole model and a part of each batch.

    The loss is divided by the size of the global batch, so the gradients are those of one process with all the
    images, whatever the parts' sizes are.
    """

    def __init__(
        self, model: Classifier, group: Group, objective: Objective, *, accumulate: int, bf16: bool, channels_last: bool
    ) -> None:
        self.model = model.to(group.device)
        if channels_last:
            self.model.to(memory_format=torch.channels_last)
            self.model.memory_format = torch.channels_last
        devices = [group.device.index] if group.device.type == "cuda" else None
        self._replica = DistributedDataParallel(
            self.model, device_ids=devices, gradient_as_bucket_view=True, forward_sync_buffers=False
        )
        self._group, self._objective, self._accumulate, self._bf16 = group, objective, accumulate, bf16

    def forward_backward(self, images_BHWC: Tensor, labels_B: Tensor, *, global_size: int) -> Tensor:
        """Add the gradients; with accumulation they are exchanged once, after the last micro-batch."""
        parts = list(zip(images_BHWC.chunk(self._accumulate), labels_B.chunk(self._accumulate), strict=True))
        total = torch.zeros((), device=self._group.device)
        for number, (images, labels) in enumerate(parts):
            last = number == len(parts) - 1
            quiet: AbstractContextManager[None] = nullcontext() if last else self._replica.no_sync()
            with quiet:
                with torch.autocast(self._group.device.type, torch.bfloat16, enabled=self._bf16):
                    losses = self._objective(self._replica, images, labels)
                share = losses.float().sum() / global_size
                torch.autograd.backward(share * self._group.world_size)  # DDP averages over processes
            total += share.detach()
        return total
