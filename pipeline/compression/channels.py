"""Which channels of a network hang together, and what goes with each of them. torch-pruning follows the channels.

Most networks are followed whole. Where channels are shuffled between layers or attention reads weights without calling
their layers, nobody can follow them: there each block is followed alone, and only the widths inside it can go.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

import torch
import torch_pruning as tp
from torch import Tensor, nn

from pipeline.errors import PipelineError

KINDS = (nn.Conv2d, nn.Linear, nn.BatchNorm1d, nn.BatchNorm2d, nn.LayerNorm, nn.GroupNorm, nn.Parameter)
SMALLEST = 0.1  # share of its channels that a layer keeps, whatever a ranking over all layers says


@dataclass(frozen=True)
class Member:
    """Channels of one module that go when channels of the group go."""

    name: str
    module: nn.Module | nn.Parameter
    outputs: bool  # its outputs, or its inputs
    own: Tensor  # int64 [M], positions in the module
    roots: Tensor  # int64 [M], positions in the group


@dataclass(frozen=True)
class ChannelGroup:
    """Channels that can only go together, named after the layer that puts them out."""

    name: str
    width: int
    parts: int  # of a grouped convolution: the same channels of each part go
    members: tuple[Member, ...]
    graph: tp.DependencyGraph
    layer: nn.Module

    def allowed(self, round_to: int) -> list[int]:
        """Return the widths that the group may have, ascending: multiples of its unit, and what it has now.

        The unit is `round_to`, halved until the group holds two of it: a stage of 16 channels could not lose any
        with 16, and would lose all with more. A part of a grouped convolution keeps two channels.
        """
        unit = round_to
        while unit > 1 and self.width < 2 * unit:
            unit //= 2
        least = max(SMALLEST * self.width, 2 * self.parts if self.parts > 1 else 1)
        widths = range(unit, self.width, unit)
        return [*(w for w in widths if w >= least and w % self.parts == 0), self.width]

    def cut(self, channels: Sequence[int]) -> None:
        """Take the channels at these positions out of the network, in place."""
        prune_outputs = self.graph.get_pruner_of_module(self.layer).prune_out_channels
        self.graph.get_pruning_group(self.layer, prune_outputs, list(channels)).prune()


def find_groups(net: nn.Module, example: Tensor, *, keep: Sequence[str]) -> list[ChannelGroup]:
    """Return the groups of channels that can go, in the order of the network.

    The last layer's outputs (the classes) and those of layers named in `keep`, with all that hangs together with them,
    are in none. The image's channels are nobody's outputs; the first layer's outputs are like any other's. Raises
    `PipelineError` for a name in `keep` that is not a layer.
    """
    kept = [net.get_submodule(name) for name in _known(net, keep)]
    groups: list[ChannelGroup] = []
    for prefix, block, block_example in _blocks(net, example):
        ignored = [*kept, _last_layer(block, block_example)]
        graph = tp.DependencyGraph().build_dependency(
            block, block_example, forward_fn=lambda module, inputs: module(inputs), verbose=False
        )
        # A block that was followed alone is called from outside: its inputs and outputs are not its own.
        inside = {layer for module in ignored for layer in module.modules()}
        groups += _groups_of(graph, prefix, ignored=list(inside))
    return groups


def _groups_of(graph: tp.DependencyGraph, prefix: str, *, ignored: list[nn.Module]) -> Iterator[ChannelGroup]:
    names = {module: prefix + name for module, name in graph._module2name.items()}
    names |= {parameter: prefix + name for parameter, name in graph._param_to_name.items()}
    for group in graph.get_all_groups(ignored_layers=ignored, root_module_types=[nn.Conv2d, nn.Linear]):
        layer = group[0].dep.target.module
        items = [(item, item.dep.target.module) for item in group.items if not _is_operation(item.dep.target.module)]
        if not all(isinstance(module, KINDS) for _, module in items):
            continue  # it reaches a module whose widths a spec does not record
        members = tuple(
            Member(
                name=names[module],
                module=module,
                outputs=bool(graph.is_out_channel_pruning_fn(item.dep.handler)),
                own=torch.tensor(item.idxs),
                roots=torch.tensor(item.root_idxs),
            )
            for item, module in items
        )
        width = graph.get_out_channels(layer)
        parts = max(_parts(member) for member in members)
        if width % parts == 0:
            yield ChannelGroup(names[layer], width, parts, members, graph, layer)


def _is_operation(module: object) -> bool:
    """Tell whether this has no channels of its own: the library's stand-in for an addition, a concatenation ..."""
    shared = isinstance(module, nn.PReLU) and module.num_parameters == 1
    return shared or type(module).__module__.startswith("torch_pruning")


def _parts(member: Member) -> int:
    """Return how many blocks of equal shape the module cuts its channels into; a depthwise convolution cuts none."""
    module = member.module
    if isinstance(module, nn.Conv2d):
        return 1 if is_depthwise(module) else module.groups
    return module.num_groups if isinstance(module, nn.GroupNorm) else 1


def is_depthwise(conv: nn.Conv2d) -> bool:
    """Tell whether each channel is convolved alone, so that inputs and outputs go together."""
    return conv.groups > 1 and conv.groups == conv.out_channels == conv.in_channels


def _known(net: nn.Module, names: Sequence[str]) -> Sequence[str]:
    known = [name for name, _ in net.named_modules() if name]
    for name in names:
        if name not in known:
            near = get_close_matches(name, known, n=5, cutoff=0.3) or known[:5]
            raise PipelineError(f"compress.prune.keep = {name!r} is no layer of this network; near: {', '.join(near)}")
    return names


def _blocks(net: nn.Module, example: Tensor) -> list[tuple[str, nn.Module, Tensor]]:
    """Return (prefix of names, module, example of its input) of each part that is followed by itself."""
    from torchvision.models import MaxVit, ShuffleNetV2, SwinTransformer, VisionTransformer
    from torchvision.models.maxvit import MBConv
    from torchvision.models.shufflenetv2 import InvertedResidual
    from torchvision.ops import MLP

    if not isinstance(net, MaxVit | ShuffleNetV2 | SwinTransformer | VisionTransformer):
        return [("", net, example)]
    inside = {InvertedResidual: "branch2", MBConv: "layers"}
    names = [f"{name}.{inside[type(m)]}" for name, m in net.named_modules() if type(m) in inside]
    names += [name for name, module in net.named_modules() if isinstance(module, MLP) or name.endswith(".mlp_layer")]
    inputs: dict[nn.Module, Tensor] = {}
    blocks = {name: net.get_submodule(name) for name in names}
    hooks = [
        block.register_forward_pre_hook(lambda module, given: inputs.update({module: given[0].detach()}))
        for block in blocks.values()
    ]
    _run(net, example)
    for hook in hooks:
        hook.remove()
    return [(f"{name}.", block, inputs[block]) for name, block in blocks.items()]


def _last_layer(net: nn.Module, example: Tensor) -> nn.Module:
    """Return the convolution or linear layer that is called last: what it puts out is what the module puts out."""
    called: list[nn.Module] = []
    layers = [module for module in net.modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    hooks = [layer.register_forward_hook(lambda module, *_: called.append(module)) for layer in layers]
    _run(net, example)
    for hook in hooks:
        hook.remove()
    if not called:
        raise PipelineError("this network calls no convolution and no linear layer, so there is nothing to prune")
    return called[-1]


@torch.no_grad()
def _run(net: nn.Module, example: Tensor) -> Tensor:
    answers: Tensor = net(example)
    return answers


def widths_after(groups: Iterable[ChannelGroup], going: dict[str, Tensor]) -> dict[str, tuple[int, int]]:
    """Return module -> (inputs, outputs) that go with the channels `going` (group -> bool [width])."""
    lost: dict[str, tuple[int, int]] = {}
    for group in groups:
        for member in group.members:
            count = int(going[group.name][member.roots].sum())
            inputs, outputs = lost.get(member.name, (0, 0))
            lost[member.name] = (inputs, outputs + count) if member.outputs else (inputs + count, outputs)
    return lost
