"""Networks as compression left them, rebuilt from their spec: blocks gone, layers narrower or quantized."""

import copy

import torch
from torch import nn

from pipeline.artifact import Artifact
from pipeline.compression.layers import quantize_layers
from pipeline.errors import PipelineError
from pipeline.models import Classifier, ModelSpec, build, load_weights, resized_conv

LAYERS = (nn.Conv2d, nn.Linear, nn.BatchNorm1d, nn.BatchNorm2d, nn.LayerNorm, nn.GroupNorm)
WIDTHS = ("in_channels", "out_channels", "groups", "in_features", "out_features", "num_features", "num_channels")


def rebuild(spec: ModelSpec) -> Classifier:
    """Return a network with fresh weights, of the blocks, widths and layer kinds that `spec` records.

    Raises `PipelineError` as `build` does, and for a layer whose width cannot change.
    """
    model = build(spec)
    for name in spec.removed:
        model.net.set_submodule(name, nn.Identity())
    for name, widths in spec.widths.items():
        _set_widths(model.net, name, widths)
    quantize_layers(model.net, spec.int8)
    return model


def load_model(source: Artifact, name: str) -> Classifier:
    """Rebuild the model `name` of an artifact from its spec and weights, in inference mode."""
    model = rebuild(ModelSpec.model_validate(source.manifest.models[name]))
    return load_weights(model, source.file(f"{name}.safetensors")).eval()


def changed_widths(net: nn.Module, spec: ModelSpec) -> dict[str, dict[str, int]]:
    """Return what `spec` must record as `widths` so that `rebuild` gives a network of the shapes of `net`."""
    dense = build(spec).net
    before, now = layer_widths(dense), layer_widths(net)
    bare = _bare_parameters(dense)
    dimensions = {
        name: {str(d): n for d, n in enumerate(parameter.shape) if n != bare[name].shape[d]}
        for name, parameter in _bare_parameters(net).items()
    }
    changed = {name: widths for name, widths in now.items() if widths != before[name]}
    return changed | {name: sizes for name, sizes in dimensions.items() if sizes}


def layer_widths(net: nn.Module) -> dict[str, dict[str, int]]:
    """Return module -> attribute -> value for every layer that has a width."""
    return {name: _widths(module) for name, module in net.named_modules() if isinstance(module, LAYERS)}


def _widths(module: nn.Module) -> dict[str, int]:
    if isinstance(module, nn.LayerNorm):
        return {"normalized_shape": int(module.normalized_shape[-1])}
    return {attribute: int(getattr(module, attribute)) for attribute in WIDTHS if hasattr(module, attribute)}


def _bare_parameters(net: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that belong to no layer of a known kind: a layer scale, a class token."""
    return {
        f"{prefix}.{name}" if prefix else name: parameter
        for prefix, module in net.named_modules()
        if not isinstance(module, LAYERS)
        for name, parameter in module.named_parameters(recurse=False)
    }


def _set_widths(net: nn.Module, name: str, widths: dict[str, int]) -> None:
    """Give the module or the bare parameter `name` other widths, freshly initialised."""
    parent, _, attribute = name.rpartition(".")
    if attribute in (owner := net.get_submodule(parent))._parameters:
        shape = list(owner.get_parameter(attribute).shape)
        for dimension, size in widths.items():
            shape[int(dimension)] = size
        setattr(owner, attribute, nn.Parameter(torch.zeros(shape)))
        return
    module = net.get_submodule(name)
    new: nn.Module
    if isinstance(module, nn.Conv2d):
        new = resized_conv(module, **widths)
    elif isinstance(module, nn.Linear):
        new = nn.Linear(
            widths.get("in_features", module.in_features),
            widths.get("out_features", module.out_features),
            bias=module.bias is not None,
        )
    elif isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.LayerNorm | nn.GroupNorm):
        new = _resized_norm(module, widths)
    else:
        raise PipelineError(f"layer {name} of kind {type(module).__name__} cannot change its width")
    net.set_submodule(name, new)


def _resized_norm(norm: nn.Module, widths: dict[str, int]) -> nn.Module:
    """Return a copy with another number of channels: a subclass (LayerNorm over channels first) stays what it is."""
    new = copy.deepcopy(norm)
    (size,) = widths.values()
    if isinstance(new, nn.LayerNorm):
        new.normalized_shape = (*new.normalized_shape[:-1], size)
    else:
        setattr(new, next(iter(widths)), size)
    for name, parameter in norm.named_parameters(recurse=False):
        setattr(new, name, nn.Parameter(torch.ones(*parameter.shape[:-1], size)))
    for name, buffer in norm.named_buffers(recurse=False):
        if buffer.ndim:
            setattr(new, name, torch.ones(size))
    return new
