"""The dynamic candidate of a model: those linear layers in row-wise int8 for which it pays on this machine."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from pipeline.compression.gains import measured_gains
from pipeline.compression.layers import Shape, find_layers, quantize_layers
from pipeline.compression.rebuild import rebuild
from pipeline.models import Classifier
from pipeline.training.group import Group, summed


@dataclass(frozen=True)
class LayerChoice:
    """What became of one linear or attention layer. `rows` of `inputs` values are what it multiplies for one image."""

    layer: str
    inputs: int | None  # None where nothing is multiplied by calling it
    outputs: int | None
    rows: int | None
    gain: float | None  # CPU time in float32 over that in int8; None where it was not measured
    int8: bool
    reason: str


def choose_layers(
    model: Classifier, *, bits: int, min_gain: float, cache: Path, group: Group
) -> tuple[LayerChoice, ...]:
    """Decide for every linear layer, alike in every process: int8 where it is `min_gain` times cheaper. 0: all."""
    shapes, refused = find_layers(model)
    gains = _shared_gains(set(shapes.values()), bits=bits, cache=cache, group=group) if min_gain else {}
    choices = [_decided(name, shape, gains.get(shape), min_gain=min_gain) for name, shape in shapes.items()]
    choices += [LayerChoice(name, None, None, None, None, False, reason) for name, reason in refused.items()]
    return tuple(choices)


def quantized(model: Classifier, choices: Collection[LayerChoice], *, bits: int) -> Classifier:
    """Return a copy of the model with the chosen layers in row-wise int8, which its spec records."""
    int8 = {choice.layer: bits for choice in choices if choice.int8}
    copy = rebuild(model.spec)
    copy.net.load_state_dict(model.net.state_dict(), strict=True)
    quantize_layers(copy.net, int8)
    return Classifier(model.spec.model_copy(update={"int8": int8}), copy.net)


def why_none(name: str, choices: Collection[LayerChoice]) -> str:
    """Return, as one line, why there is no candidate `name`: none of the layers was chosen."""
    measured = [choice for choice in choices if choice.gain is not None]
    if not measured:
        return f"no candidate {name}: the network has no linear layer that can be int8"
    best = max(measured, key=lambda choice: choice.gain or 0)
    return (
        f"no candidate {name}: no linear layer gains enough from int8 on this machine (best: {best.layer}, "
        f"{best.gain:.2f}x); --compress.quantize.min_gain 0 makes it all the same"
    )


def _shared_gains(shapes: Collection[Shape], *, bits: int, cache: Path, group: Group) -> dict[Shape, float]:
    """Measure in the leading process, while the others wait for its figures."""
    ordered = sorted(shapes, key=str)
    if not ordered:
        return {}
    gains = measured_gains(ordered, bits=bits, cache=cache) if group.leads else {}
    return dict(zip(ordered, summed(group, *(gains.get(shape, 0.0) for shape in ordered)), strict=True))


def _decided(name: str, shape: Shape, gain: float | None, *, min_gain: float) -> LayerChoice:
    int8 = gain is None or gain >= min_gain
    reason = "not measured: min_gain = 0" if gain is None else f"{gain:.2f}x, {min_gain:g}x is asked for"
    return LayerChoice(name, shape.inputs, shape.outputs, shape.rows, gain, int8, reason)
