"""Unstructured sparsity: the smallest weights become zeros, and zeros stay. A smaller compressed file, never speed.

ONNX Runtime multiplies by a zero as by any other number, so nothing here is called faster.
"""

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.models import Classifier


@torch.no_grad()
def sparsify(net: nn.Module, *, share: float) -> dict[str, Tensor]:
    """Set the `share` of the weights of convolutions and linear layers that are smallest to 0, in place.

    Weights are ranked together, so the share holds over the network and not in each layer. Returns weight -> bool:
    which of its elements are zeros now.
    """
    weights = prunable(net)
    order = torch.cat([weight.abs().flatten() for weight in weights.values()]).argsort(stable=True)
    gone = torch.zeros(len(order), dtype=torch.bool)
    gone[order[: round(share * len(order))]] = True
    parts = torch.split(gone, [weight.numel() for weight in weights.values()])
    zeros = {name: part.view(weight.shape) for (name, weight), part in zip(weights.items(), parts, strict=True)}
    set_zeros(net, zeros)
    return zeros


def hold_zeros(optimizer: torch.optim.Optimizer, net: nn.Module, zeros: Mapping[str, Tensor]) -> None:
    """Set the zeros again after every step of the optimizer: nothing is left of this in the weights' names."""
    optimizer.register_step_post_hook(lambda *_: set_zeros(net, zeros))


@torch.no_grad()
def set_zeros(net: nn.Module, zeros: Mapping[str, Tensor]) -> None:
    """Set the marked elements of each weight to 0."""
    for name, where in zeros.items():
        weight = net.get_parameter(name)
        weight.masked_fill_(where.to(weight.device), 0)


def prunable(net: nn.Module) -> dict[str, Tensor]:
    """Return the weights of convolutions and linear layers by name: most of the bytes, and all of the multiplying."""
    layers = ((name, m) for name, m in net.named_modules() if isinstance(m, nn.Conv2d | nn.Linear))
    return {f"{name}.weight" if name else "weight": layer.weight for name, layer in layers}


def size_facts(model: Classifier, weights: Path) -> dict[str, float]:
    """Return what the weights in the file amount to: parameters, those that are not zero, and bytes."""
    tensors = [tensor for tensor in model.net.state_dict().values() if tensor.ndim]
    return {
        "params": float(sum(tensor.numel() for tensor in tensors)),
        "nonzeros": float(sum(int(tensor.count_nonzero()) for tensor in tensors)),
        "weights_bytes": float(weights.stat().st_size),
    }


def compressed_bytes(path: Path) -> int:
    """Return the bytes of the file as an archive that deflates would hold it."""
    return len(zlib.compress(path.read_bytes(), 6))


def sparsity_facts(model: Classifier) -> dict[str, Any]:
    """Return the share of zeros among the weights that sparsity may take, in the network and in each layer."""
    weights = prunable(model.net)
    zeros = {name: int((weight == 0).sum()) for name, weight in weights.items()}
    total = sum(weight.numel() for weight in weights.values())
    return {
        "sparsity": sum(zeros.values()) / total,
        "layers": {name: zeros[name] / weight.numel() for name, weight in weights.items()},
    }
