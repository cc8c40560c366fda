"""Networks as compression left them: narrower layers and quantized ones, rebuilt from what the spec records."""

from torch import nn

from pipeline.artifact import Artifact
from pipeline.compression.quantize import RowwiseInt8Linear
from pipeline.errors import PipelineError
from pipeline.models import Classifier, ModelSpec, build, load_weights, resized_conv

WIDTHS = ("in_channels", "out_channels", "groups", "in_features", "out_features", "num_features")


def rebuild(spec: ModelSpec) -> Classifier:
    """Return a network with fresh weights, of the widths and layer kinds that `spec` records.

    Raises `PipelineError` as `build` does, and for a layer whose width cannot change.
    """
    model = build(spec)
    modules = dict(model.net.named_modules())
    for name, widths in spec.widths.items():
        _set_widths(model.net, name, modules[name], widths)
    for name, bits in spec.int8.items():
        linear = model.net.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        model.net.set_submodule(name, RowwiseInt8Linear(linear.in_features, linear.out_features, bits=bits))
    return model


def load_model(source: Artifact, name: str) -> Classifier:
    """Rebuild the model `name` of an artifact from its spec and weights, in inference mode."""
    model = rebuild(ModelSpec.model_validate(source.manifest.models[name]))
    return load_weights(model, source.file(f"{name}.safetensors")).eval()


def dense_widths(spec: ModelSpec) -> dict[str, dict[str, int]]:
    """Return every layer's widths in the network before pruning."""
    return layer_widths(build(spec).net)


def layer_widths(net: nn.Module) -> dict[str, dict[str, int]]:
    """Return module -> attribute -> value for every layer that has a width."""
    layers = (nn.Conv2d, nn.Linear, nn.BatchNorm2d)
    return {
        name: {attribute: int(getattr(module, attribute)) for attribute in WIDTHS if hasattr(module, attribute)}
        for name, module in net.named_modules()
        if isinstance(module, layers)
    }


def _set_widths(net: nn.Module, name: str, module: nn.Module, widths: dict[str, int]) -> None:
    """Replace `module` by one of the same kind and options with other widths, freshly initialised."""
    new: nn.Module
    if isinstance(module, nn.Conv2d):
        new = resized_conv(module, **widths)
    elif isinstance(module, nn.Linear):
        new = nn.Linear(
            widths.get("in_features", module.in_features),
            widths.get("out_features", module.out_features),
            bias=module.bias is not None,
        )
    elif isinstance(module, nn.BatchNorm2d):
        new = nn.BatchNorm2d(
            widths["num_features"], eps=module.eps, momentum=module.momentum, affine=module.affine,
            track_running_stats=module.track_running_stats,
        )  # fmt: skip
    else:
        raise PipelineError(f"layer {name} of kind {type(module).__name__} cannot change its width")
    net.set_submodule(name, new)
