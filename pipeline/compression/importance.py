"""How much each channel matters: one number for every channel of a group, from the weights that go with it."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.compression.channels import ChannelGroup, Member, is_depthwise
from pipeline.errors import PipelineError
from pipeline.loader import Images
from pipeline.models import Classifier
from pipeline.training.group import Group

GRADIENT_IMAGES = 512
GRADIENT_BATCH = 64
TINY = 1e-30


def score(group: ChannelGroup, kind: str) -> Tensor | None:
    """Return float64 [width / parts], of mean 1: the mean over the layers of what each channel's weights amount to.

    `l1` sums magnitudes, `l2` squares, `taylor` |weight x gradient| (Molchanov et al., 2019), which needs `.grad`;
    `bn_scale` takes the magnitude of BatchNorm's scales alone (Liu et al., 2017), so a group without one has None.
    Channels of a grouped convolution's parts go together, so theirs are added up.
    """
    total = torch.zeros(group.width, dtype=torch.float64)
    judged = 0
    for member in group.members:
        if (saliency := _saliency(member, kind)) is not None:
            total.scatter_add_(0, member.roots, saliency.double()[member.own])
            judged += 1
    if not judged:
        return None
    parts = total.view(group.parts, -1).sum(0) / judged
    return parts / parts.mean().clamp_min(TINY)


def check_importance(kind: str, net: nn.Module) -> None:
    """Raise `PipelineError` when the network has nothing that this importance looks at."""
    if kind == "bn_scale" and not any(isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d) for m in net.modules()):
        raise PipelineError(
            "compress.prune.importance = 'bn_scale', but this network has no BatchNorm; use l1, l2 or taylor"
        )


def gradients(model: Classifier, images: Images, *, group: Group) -> dict[str, Tensor]:
    """Return parameter -> gradient of the mean loss over the same training images on every process, on the CPU.

    The images are spread evenly over the split, in inference mode and without augmentation: no clock and no generator
    has a say.
    """
    count = min(GRADIENT_IMAGES, len(images))
    positions = torch.linspace(0, len(images) - 1, count).long().numpy()
    model.to(group.device).eval().zero_grad(set_to_none=True)
    for start in range(0, count, GRADIENT_BATCH):
        part = positions[start : start + GRADIENT_BATCH]
        logits = model(torch.from_numpy(images.batch(part)).to(group.device))
        labels = torch.from_numpy(images.split.labels[part]).to(group.device)
        torch.autograd.backward(F.cross_entropy(logits, labels, reduction="sum") / count)
    found: dict[str, Tensor] = {}
    for name, parameter in model.net.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
        dist.broadcast(gradient, 0)  # two GPUs need not add up in the same order
        found[name] = gradient.cpu()
    model.zero_grad(set_to_none=True)
    return found


def lay_gradients(net: nn.Module, found: Mapping[str, Tensor]) -> None:
    """Put each gradient beside its parameter, where `taylor` reads it."""
    for name, parameter in net.named_parameters():
        parameter.grad = found[name].clone()


def _saliency(member: Member, kind: str) -> Tensor | None:
    """Return what each of the module's own channels amounts to; None when the module has no say."""
    module = member.module
    weight = None if isinstance(module, nn.Parameter) else module.weight
    norm = isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d)
    if not isinstance(weight, nn.Parameter) or (kind == "bn_scale" and not norm):
        return None
    values = _values(weight, kind)
    if not isinstance(module, nn.Conv2d | nn.Linear):
        return values
    if member.outputs:
        return values.flatten(1).sum(1)
    parts = module.groups if isinstance(module, nn.Conv2d) and not is_depthwise(module) else 1
    return values.reshape(parts, values.shape[0] // parts, values.shape[1], -1).sum((1, 3)).flatten()


def _values(weight: nn.Parameter, kind: str) -> Tensor:
    values = weight.detach()
    if kind == "l2":
        return values.square()
    if kind == "taylor":
        assert weight.grad is not None
        values = values * weight.grad
    return values.abs()
