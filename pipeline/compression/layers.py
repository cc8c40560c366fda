"""Which layers of a network can be int8, and their replacement by such layers."""

import copy
from dataclasses import dataclass

import torch
from torch import nn

from pipeline.compression.attention import UnfoldedAttention, why_not
from pipeline.compression.quantize import RowwiseInt8Linear
from pipeline.models import Classifier


@dataclass(frozen=True)
class Shape:
    """What a linear layer multiplies for one image: `rows` of `inputs` values by a matrix."""

    inputs: int
    outputs: int
    rows: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.inputs}x{self.outputs}"


def find_layers(model: Classifier) -> tuple[dict[str, Shape], dict[str, str]]:
    """Return the layers that can be int8, and why the other linear and attention layers cannot.

    One image, then two, go through a copy of the network on the CPU. The projections of an attention layer are called
    `<layer>.in_proj` and `<layer>.out_proj`.
    """
    traced = Classifier(model.spec, copy.deepcopy(model.net)).cpu().eval()
    refused = {name: reason for name, module in _attention(traced.net).items() if (reason := why_not(module))}
    for name, attention in _attention(traced.net).items():
        if name not in refused:
            traced.net.set_submodule(name, UnfoldedAttention(attention))
    linears = {name: module for name, module in traced.net.named_modules() if isinstance(module, nn.Linear)}
    for_one, for_two = (_rows(traced, linears, images=images) for images in (1, 2))
    parts_of_refused = tuple(f"{name}." for name in refused)
    shapes: dict[str, Shape] = {}
    for name, module in linears.items():
        if name.startswith(parts_of_refused):
            continue
        reason = _why_not(module, for_one[name], for_two[name], projection=name.endswith(".in_proj"))
        if reason:
            refused[name] = reason
        else:
            shapes[name] = Shape(module.in_features, module.out_features, max(for_one[name]))
    return shapes, refused


def _rows(model: Classifier, linears: dict[str, nn.Linear], *, images: int) -> dict[str, list[int]]:
    """Return how many rows each layer multiplies, for each of its calls."""
    rows: dict[str, list[int]] = {name: [] for name in linears}
    handles = [
        module.register_forward_hook(lambda m, _, y, name=name: rows[name].append(y.numel() // m.out_features))
        for name, module in linears.items()
    ]
    spec = model.spec
    with torch.no_grad():
        model(torch.zeros(images, spec.height, spec.width, spec.channels, dtype=torch.uint8))
    for handle in handles:
        handle.remove()
    return rows


def _why_not(linear: nn.Linear, for_one: list[int], for_two: list[int], *, projection: bool) -> str | None:
    if type(linear) is not nn.Linear:
        return f"{type(linear).__name__} may compute something else than a linear layer"
    if not for_one:
        return "its weights are read without calling it"
    if for_one == for_two:
        return "its input is the same for every image"
    if projection and len(for_one) > 1:
        return "its queries, keys and values are not one tensor"
    return None


def quantize_layers(net: nn.Module, int8: dict[str, int]) -> None:
    """Replace the layers named in `int8` by layers with so many weight bits, in place, and nothing else."""
    for name, attention in _attention(net).items():
        if any(layer.startswith(f"{name}.") for layer in int8):
            net.set_submodule(name, UnfoldedAttention(attention))
    for name, bits in int8.items():
        linear = net.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        net.set_submodule(name, RowwiseInt8Linear.from_linear(linear, bits=bits))
    for module in net.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # its fused kernel would read the weights without calling the layers


def _attention(net: nn.Module) -> dict[str, nn.MultiheadAttention]:
    return {name: module for name, module in net.named_modules() if isinstance(module, nn.MultiheadAttention)}
