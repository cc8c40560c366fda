"""Structured pruning: whole channels go, together with everything that depends on them.

`channels` says what hangs together and `importance` what matters; the result is a smaller network and its widths as
data, so that it is rebuilt like any other.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipeline.compression.channels import ChannelGroup, find_groups, widths_after
from pipeline.compression.importance import check_importance, lay_gradients, score
from pipeline.compression.macs import LayerMacs, count_macs, layer_macs
from pipeline.compression.rebuild import changed_widths, layer_widths, rebuild
from pipeline.errors import PipelineError
from pipeline.models import Classifier, ModelSpec

FOLLOWING = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True)
class Rule:
    """Which channels go first, and to which widths. The fields are those of [compress.prune]."""

    round_to: int
    importance: str
    scope: str
    keep: tuple[str, ...] = ()


@dataclass(frozen=True)
class Judged:
    """A network of our own whose channels are grouped and ranked, so that any share of them can go."""

    net: nn.Module
    groups: tuple[ChannelGroup, ...]
    scores: Mapping[str, Tensor]
    base: Mapping[str, int]  # group -> the width that shares are taken of
    layers: tuple[LayerMacs, ...]
    macs: int


def prune(
    model: Classifier,
    *,
    ratio: float,
    rule: Rule,
    origin: ModelSpec | None = None,
    gradients: Mapping[str, Tensor] | None = None,
) -> Classifier:
    """Return a new model without the `ratio` least important channels; the given one is left as it is.

    The share is of the channels of `origin`, by default of the model's own. Widths stay multiples of `round_to`, or
    of a half, a quarter ... of it in layers narrower than twice as much. The classes, the image's channels and layers
    in `keep` are never touched; the first layer's outputs go like any other's. `scope` ranks channels `uniform` (in
    each layer) or `global` (over all, but 10 % of each layer stay). Attention keeps its widths, and so does the
    stream that it reads: there the hidden widths of the blocks go. `gradients` are for `taylor`.
    Raises `PipelineError` that names a network that cannot be pruned, and why.
    """
    judged = judge(model, rule=rule, origin=origin, gradients=gradients)
    return cut(model, judged, going(judged, ratio=ratio, rule=rule))


def judge(
    model: Classifier,
    *,
    rule: Rule,
    origin: ModelSpec | None = None,
    gradients: Mapping[str, Tensor] | None = None,
) -> Judged:
    """Return a copy of the network with its channels grouped and ranked; see `prune` for arguments and errors."""
    spec = model.spec
    if spec.int8:
        raise PipelineError(f"{spec.name} is quantized already; prune before quantizing")
    net = copy.deepcopy(model.net).cpu().eval()
    check_importance(rule.importance, net)
    if gradients is not None:
        lay_gradients(net, gradients)
    try:
        found = find_groups(net, torch.zeros(2, spec.channels, spec.height, spec.width), keep=rule.keep)
    except FOLLOWING as error:
        raise _refusal(spec, error) from error
    scores = {group.name: scored for group in found if (scored := score(group, rule.importance)) is not None}
    groups = tuple(group for group in found if group.name in scores)
    if not any(len(group.allowed(rule.round_to)) > 1 for group in groups):
        raise PipelineError(
            f"model.name = {spec.name!r} has no channels that can go with compress.prune.importance = "
            f"{rule.importance!r}, round_to = {rule.round_to} and keep = {', '.join(rule.keep) or 'none'}"
        )
    widths = layer_widths(rebuild(origin or spec).net)
    base = {group.name: _outputs(widths[group.name]) for group in groups}
    return Judged(net, groups, scores, base, layer_macs(model), count_macs(model))


def going(judged: Judged, *, ratio: float, rule: Rule) -> dict[str, Tensor]:
    """Return group -> bool [width]: which channels go so that `ratio` of the base widths is gone."""
    wanted = (_over_all if rule.scope == "global" else _in_each)(judged, ratio)
    chosen: dict[str, Tensor] = {}
    for group in judged.groups:
        width = min(group.allowed(rule.round_to), key=lambda w: (abs(w - wanted[group.name]), w))
        least = judged.scores[group.name].argsort(stable=True)[: (group.width - width) // group.parts]
        part = torch.zeros(group.width // group.parts, dtype=torch.bool)
        part[least] = True
        chosen[group.name] = part.repeat(group.parts)
    return chosen


def macs_after(judged: Judged, chosen: Mapping[str, Tensor]) -> int:
    """Return the multiply-accumulates of one image once these channels are gone, without cutting anything."""
    lost = widths_after(judged.groups, dict(chosen))
    return judged.macs - sum(layer.saved(*lost.get(layer.name, (0, 0))) for layer in judged.layers)


def cut(model: Classifier, judged: Judged, chosen: Mapping[str, Tensor]) -> Classifier:
    """Cut the channels out of the judged copy, which is used up, and return it as a model that its spec describes."""
    spec = model.spec
    try:
        for group in judged.groups:
            if positions := chosen[group.name].nonzero().flatten().tolist():
                group.cut(positions)
        pruned = rebuild(spec.model_copy(update={"widths": changed_widths(judged.net, spec)}))
        pruned.net.load_state_dict(judged.net.state_dict(), strict=True)
        _require_running(pruned)
    except FOLLOWING as error:
        raise _refusal(spec, error) from error
    return pruned


def _outputs(widths: Mapping[str, int]) -> int:
    return widths["out_channels"] if "out_channels" in widths else widths["out_features"]


def _in_each(judged: Judged, ratio: float) -> dict[str, float]:
    return {name: (1 - ratio) * width for name, width in judged.base.items()}


def _over_all(judged: Judged, ratio: float) -> dict[str, float]:
    """Rank the channels of all groups together; one of a grouped convolution counts as many as go with it."""
    groups = judged.groups
    scores = torch.cat([judged.scores[group.name] for group in groups])
    owner = torch.cat([torch.full((len(judged.scores[group.name]),), n) for n, group in enumerate(groups)])
    order = scores.argsort(stable=True)
    weight = torch.tensor([group.parts for group in groups])[owner[order]]
    excess = sum(group.width for group in groups) - (1 - ratio) * sum(judged.base.values())
    gone = owner[order[: int((weight.cumsum(0) <= excess).sum())]].bincount(minlength=len(groups)).tolist()
    return {group.name: float(group.width - n * group.parts) for group, n in zip(groups, gone, strict=True)}


@torch.no_grad()
def _require_running(model: Classifier) -> None:
    """Raise RuntimeError unless the network answers with one number for each class."""
    spec = model.spec
    shape = model.eval()(torch.zeros(2, spec.height, spec.width, spec.channels, dtype=torch.uint8)).shape
    if shape != (2, spec.num_classes):
        raise RuntimeError(f"it answers with {list(shape)} numbers instead of {spec.num_classes} for each image")


def _refusal(spec: ModelSpec, error: Exception) -> PipelineError:
    return PipelineError(
        f"model.name = {spec.name!r} cannot be pruned: {type(error).__name__} ({error}) following its channels; "
        "choose another network or pass --compress.prune.enabled false"
    )
