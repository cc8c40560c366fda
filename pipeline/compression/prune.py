"""Structured pruning: whole channels go, together with everything that depends on them.

torch-pruning finds which layers' channels hang together; the result is a smaller network and its widths as data.
"""

import copy

import torch
import torch_pruning as tp
from torch import nn

from pipeline.compression.rebuild import dense_widths, layer_widths, rebuild
from pipeline.errors import PipelineError
from pipeline.models import Classifier


def prune(model: Classifier, *, ratio: float, round_to: int, importance: str, scope: str) -> Classifier:
    """Return a new model without the `ratio` least important channels; the given one is left as it is.

    Widths stay multiples of `round_to`, and the classes are never touched. `importance` is the L1 or L2 norm of a
    channel's weights, summed over the layers that it hangs together with; `scope` ranks channels `uniform` (in each
    layer) or `global` (over all). Raises `PipelineError` that names a network that cannot be pruned, and why.
    """
    spec = model.spec
    if spec.int8:
        raise PipelineError(f"{spec.name} is quantized already; prune before quantizing")
    net = copy.deepcopy(model.net).cpu().eval()
    example = torch.zeros(2, spec.channels, spec.height, spec.width)
    heads = [module for module in net.modules() if _outputs(module) == spec.num_classes]
    try:
        pruner = tp.pruner.BasePruner(
            net,
            example,
            importance=tp.importance.GroupMagnitudeImportance(p=1 if importance == "l1" else 2),
            pruning_ratio=ratio,
            global_pruning=scope == "global",
            max_pruning_ratio=0.9,  # a global ranking must not empty a layer
            round_to=round_to,
            ignored_layers=heads[-1:],
        )
        pruner.step()
        return _rebuilt(model, net)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise PipelineError(
            f"model.name = {spec.name!r} cannot be pruned: {type(error).__name__} ({error}) following its channels; "
            "choose another network or pass --compress.prune.enabled false"
        ) from error


def _outputs(module: nn.Module) -> int | None:
    """Return the number of outputs of a convolution or linear layer; None for every other module."""
    if isinstance(module, nn.Conv2d):
        return module.out_channels
    return module.out_features if isinstance(module, nn.Linear) else None


def _rebuilt(model: Classifier, net: nn.Module) -> Classifier:
    """Return the pruned `net` as a model that its spec describes; RuntimeError when widths alone do not describe it."""
    spec = model.spec
    dense = dense_widths(spec)
    widths = {name: now for name, now in layer_widths(net).items() if now != dense[name]}
    pruned = rebuild(spec.model_copy(update={"widths": widths}))
    pruned.net.load_state_dict(net.state_dict(), strict=True)
    return pruned


def count_macs(model: Classifier) -> int:
    """Return the multiply-accumulates of one image, over convolutions and linear layers."""
    spec, total = model.spec, 0

    def count(module: nn.Module, _inputs: object, output: torch.Tensor) -> None:
        nonlocal total
        per_output = module.weight[0].numel() if isinstance(module, nn.Conv2d | nn.Linear) else 0
        total += per_output * output.numel()

    layers = [m for m in model.net.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    hooks = [layer.register_forward_hook(count) for layer in layers]
    training = model.training
    model.eval()
    with torch.no_grad():
        model(torch.zeros(1, spec.height, spec.width, spec.channels, dtype=torch.uint8))
    model.train(training)
    for hook in hooks:
        hook.remove()
    return total
