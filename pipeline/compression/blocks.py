"""Depth pruning: whole residual blocks go, those that the loss misses least.

What is left keeps its widths, so what goes takes its time with it, also where channels are so few that narrower layers
would only waste the machine's vectors.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.compression.rebuild import rebuild
from pipeline.errors import PipelineError
from pipeline.loader import Images
from pipeline.models import Classifier
from pipeline.training.group import Group, summed

IMAGES = 256
BATCH = 64


def remove_blocks(model: Classifier, images: Images, *, share: float, blocks: int, group: Group) -> Classifier:
    """Return a new model in which `share` of the `blocks` that the dense network can lose are gone.

    One after the other that block goes without which the loss over training images is least, as it is before any
    training after it (Veit et al., 2016: what is left of a residual network still works). Runs in every process, to
    the same end in all. Raises `PipelineError` when the network has no such block.
    """
    if not blocks:
        raise PipelineError(
            f"compress.prune.blocks = {share:g}, but model.name = {model.spec.name!r} has no block that can go: none "
            "in an nn.Sequential gives back the shape it takes; pass --compress.prune.blocks 0"
        )
    if model.spec.int8:
        raise PipelineError(f"{model.spec.name} is quantized already; prune before quantizing")
    removed = list(model.spec.removed)
    for _ in range(round(share * blocks) - len(removed)):
        rest = [name for name in removable(model) if name not in removed]
        losses = [_loss_without(model, [*removed, name], images, group=group) for name in rest]
        removed.append(rest[losses.index(min(losses))])
    state = model.net.state_dict()
    shallow = rebuild(model.spec.model_copy(update={"removed": tuple(sorted(removed))}))
    shallow.net.load_state_dict({name: state[name] for name in shallow.net.state_dict()}, strict=True)
    return shallow


def removable(model: Classifier) -> list[str]:
    """Return the names of blocks without which the network still runs, in the order in which they are called.

    A block stands in an `nn.Sequential`, is more than one layer, and gives back the shape that it takes: a basic or
    bottleneck block, an inverted residual, a transformer's encoder block. Parts of a block are none.
    """
    found: dict[str, None] = {}

    def note(name: str, _module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if len(inputs) == 1 and isinstance(output, Tensor) and inputs[0].shape == output.shape:
            found[name] = None

    net = copy.deepcopy(model.net).cpu().eval()
    blocks = {
        f"{parent}.{name}" if parent else name: child
        for parent, sequence in net.named_modules()
        if isinstance(sequence, nn.Sequential)
        for name, child in sequence.named_children()
        if _is_block(child)
    }
    for name, block in blocks.items():
        if not any(name.startswith(f"{outer}.") for outer in blocks):
            block.register_forward_hook(partial(note, name))
    spec = model.spec
    with torch.no_grad():
        net(torch.zeros(2, spec.channels, spec.height, spec.width))
    return list(found)


def _is_block(module: nn.Module) -> bool:
    layers = [m for m in module.modules() if next(m.parameters(recurse=False), None) is not None]
    return len(layers) > 1 and not isinstance(module, nn.Sequential)


@torch.no_grad()
def _loss_without(model: Classifier, names: list[str], images: Images, *, group: Group) -> float:
    """Return the mean loss over training images, spread evenly over the split; each process answers a part of them."""
    count = min(IMAGES, len(images))
    positions = torch.linspace(0, len(images) - 1, count).long()[group.rank :: group.world_size].numpy()
    total = 0.0
    model.to(group.device).eval()
    with _without(model.net, names):
        for start in range(0, len(positions), BATCH):
            part = positions[start : start + BATCH]
            logits = model(torch.from_numpy(images.batch(part)).to(group.device))
            labels = torch.from_numpy(images.split.labels[part]).to(group.device)
            total += float(F.cross_entropy(logits, labels, reduction="sum"))
    return summed(group, total)[0] / count


@contextmanager
def _without(net: nn.Module, names: list[str]) -> Iterator[None]:
    """Let the named blocks give back what they take."""
    hooks = [
        net.get_submodule(name).register_forward_hook(lambda _module, inputs, _output: inputs[0]) for name in names
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
