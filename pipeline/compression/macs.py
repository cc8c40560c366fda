"""Multiply-accumulates of one image: of a whole network, and what each layer gives back when it is made narrower."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from pipeline.compression.channels import is_depthwise
from pipeline.models import Classifier


@dataclass(frozen=True)
class LayerMacs:
    """A convolution or linear layer, called at `positions` places of one image."""

    name: str
    positions: int
    inputs: int
    outputs: int
    groups: int
    kernel: int  # elements
    depthwise: bool  # inputs and outputs go together, and so do groups

    def saved(self, inputs: int, outputs: int) -> int:
        """Return the multiply-accumulates that go with so many inputs and outputs."""
        return self._macs(self.inputs, self.outputs) - self._macs(self.inputs - inputs, self.outputs - outputs)

    def _macs(self, inputs: int, outputs: int) -> int:
        per_output = 1 if self.depthwise else inputs // self.groups
        return self.positions * self.kernel * outputs * per_output


def count_macs(model: Classifier) -> int:
    """Return the multiply-accumulates of one image, of convolutions, linear layers and attention's projections."""
    with FlopCounterMode(display=False) as counter:
        _run(model)
    return int(counter.get_total_flops()) // 2


def layer_macs(model: Classifier) -> tuple[LayerMacs, ...]:
    """Return every convolution and linear layer that is called, once for each call."""
    found: list[LayerMacs] = []

    def note(name: str, layer: nn.Module, output: Tensor) -> None:
        assert isinstance(layer, nn.Conv2d | nn.Linear)
        groups, depthwise = (layer.groups, is_depthwise(layer)) if isinstance(layer, nn.Conv2d) else (1, False)
        outputs, per_group = layer.weight.shape[:2]
        found.append(
            LayerMacs(
                name=name,
                positions=output.numel() // outputs,
                inputs=per_group * groups,
                outputs=outputs,
                groups=groups,
                kernel=layer.weight[0, 0].numel(),
                depthwise=depthwise,
            )
        )

    layers = {name: m for name, m in model.net.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)}
    hooks = [
        layer.register_forward_hook(lambda module, _inputs, output, name=name: note(name, module, output))
        for name, layer in layers.items()
    ]
    _run(model)
    for hook in hooks:
        hook.remove()
    return tuple(found)


@torch.no_grad()
def _run(model: Classifier) -> None:
    """Answer one black image in inference mode, wherever the model is; the mode is given back."""
    spec, training = model.spec, model.training
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # a fused attention is one operation that nobody counts
    model.eval()
    model(torch.zeros(1, spec.height, spec.width, spec.channels, dtype=torch.uint8, device=model.mean.device))
    model.train(training)
    torch.backends.mha.set_fastpath_enabled(fused)
