"""Optimizers and learning-rate schedules as the recipe names them."""

import math

import torch
from torch import nn


def build_optimizer(
    model: nn.Module, *, name: str, lr: float, momentum: float, weight_decay: float
) -> torch.optim.Optimizer:
    """Return SGD (Nesterov), Adam or AdamW. Biases and normalisation weights are not decayed."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    if name == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=momentum, nesterov=momentum > 0)
    return torch.optim.Adam(groups, lr=lr) if name == "adam" else torch.optim.AdamW(groups, lr=lr)


def learning_rate(step: int, *, peak: float, schedule: str, warmup_steps: int, total_steps: int) -> float:
    """Return the rate of `step`: a linear warm-up to `peak`, then constant, or a half cosine down to 0."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule == "constant":
        return peak
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return peak * 0.5 * (1 + math.cos(math.pi * progress))
