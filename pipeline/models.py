"""Networks as plain data: a `ModelSpec` says everything that rebuilds a network, and safetensors hold its weights.

Shape legend: B batch, H height, W width, C channels, K classes.
"""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pipeline.errors import PipelineError

PREFIX = "module."  # what DataParallel and DDP put before every name


class ModelSpec(BaseModel):
    """A network as data: `removed` and `widths` hold what pruning changed, `int8` which linear layers are quantized."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    num_classes: int
    channels: int
    height: int
    width: int
    mean: tuple[float, ...]  # per channel, of pixels in [0, 1]
    std: tuple[float, ...]
    dropout: float = 0.0
    removed: tuple[str, ...] = ()  # residual blocks that are gone: what enters one leaves it as it is
    widths: dict[str, dict[str, int]] = {}  # module -> attribute -> value, where it differs from the dense network
    int8: dict[str, int] = {}  # module -> weight bits


class SimpleCNN(nn.Module):
    """One 3x3 convolution of 32 channels, then a linear layer."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        _require_size(spec, at_least=3)
        self.conv = nn.Conv2d(spec.channels, 32, 3)
        self.dropout = nn.Dropout(spec.dropout)
        self.fc = nn.Linear(32 * (spec.height - 2) * (spec.width - 2), spec.num_classes)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return logits [B, K]."""
        return cast(Tensor, self.fc(self.dropout(F.relu(self.conv(x_BCHW)).flatten(1))))


class LeNet(nn.Module):
    """Two 5x5 convolutions of 10 and 20 channels, each with 2x2 max-pooling, then linear layers of 50 and K."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        _require_size(spec, at_least=16)
        height, width = ((((side - 4) // 2) - 4) // 2 for side in (spec.height, spec.width))
        self.conv1 = nn.Conv2d(spec.channels, 10, 5)
        self.conv2 = nn.Conv2d(10, 20, 5)
        self.dropout = nn.Dropout(spec.dropout)
        self.fc1 = nn.Linear(20 * height * width, 50)
        self.fc2 = nn.Linear(50, spec.num_classes)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return logits [B, K]."""
        x = F.max_pool2d(F.relu(self.conv1(x_BCHW)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return cast(Tensor, self.fc2(self.dropout(F.relu(self.fc1(x.flatten(1))))))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut; a 1x1 convolution on the shortcut where the shape changes.

    He et al. (2016) pad the shortcut with zeros instead ("option A"). A projection costs 0.6 % more MACs and lets
    pruning narrow both branches together.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, of the same height and width divided by the stride."""
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


class CifarResNet(nn.Module):
    """ResNet of 6n + 2 layers for small images: He et al. (2016), section 4.2. Stages of 16, 32 and 64 channels."""

    def __init__(self, spec: ModelSpec, *, blocks: int) -> None:
        super().__init__()
        _require_size(spec, at_least=8)
        self.conv = nn.Conv2d(spec.channels, 16, 3, 1, 1, bias=False)
        self.bn = nn.BatchNorm2d(16)
        layers: list[nn.Module] = []
        for inputs, outputs, stride in ((16, 16, 1), (16, 32, 2), (32, 64, 2)):
            layers += [BasicBlock(inputs, outputs, stride)]
            layers += [BasicBlock(outputs, outputs, 1) for _ in range(blocks - 1)]
        self.layers = nn.Sequential(*layers)
        self.fc = nn.Linear(64, spec.num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return logits [B, K]."""
        x = self.layers(F.relu(self.bn(self.conv(x_BCHW))))
        return cast(Tensor, self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1)))


class Classifier(nn.Module):
    """A network with its normalisation: takes the pixels that `decode` gives, so nobody can normalise differently."""

    mean: Tensor
    std: Tensor

    def __init__(self, spec: ModelSpec, net: nn.Module) -> None:
        super().__init__()
        self.spec = spec
        self.net = net
        self.memory_format = torch.contiguous_format
        self.register_buffer("mean", torch.tensor(spec.mean).view(1, -1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(spec.std).view(1, -1, 1, 1), persistent=False)

    def normalise(self, images_BHWC: Tensor) -> Tensor:
        """Return float32 [B, C, H, W] with zero mean and unit spread, from uint8 [B, H, W, C]."""
        x_BCHW = images_BHWC.permute(0, 3, 1, 2).float().contiguous(memory_format=self.memory_format)
        return (x_BCHW / 255 - self.mean) / self.std

    def forward(self, images_BHWC: Tensor) -> Tensor:
        """Return logits [B, K] for uint8 images [B, H, W, C]."""
        return cast(Tensor, self.net(self.normalise(images_BHWC)))


BUILDERS: dict[str, Callable[[ModelSpec], nn.Module]] = {
    "simple_cnn": SimpleCNN,
    "lenet": LeNet,
    "resnet20": lambda spec: CifarResNet(spec, blocks=3),
    "resnet56": lambda spec: CifarResNet(spec, blocks=9),
}


def build(spec: ModelSpec) -> Classifier:
    """Return the dense network of `spec` with fresh weights; `compression.rebuild` builds what pruning left of one.

    Raises `PipelineError` for an unknown name or for an image size or channel count that the network does not take.
    """
    return Classifier(spec, _build_net(spec))


def save_weights(model: Classifier, path: Path) -> None:
    """Write the weights as safetensors, in the order of their names, whatever wrapper the model had."""
    save_file({name: tensor.contiguous() for name, tensor in sorted(model.net.state_dict().items())}, path)


def load_weights(model: Classifier, path: Path) -> Classifier:
    """Load safetensors with every key present and no other. A `module.` prefix (DataParallel, DDP) is taken off.

    Raises `PipelineError` that lists what is missing, unexpected or of another shape.
    """
    state = load_file(path)
    while all(name.startswith(PREFIX) for name in state) and not state.keys() <= model.net.state_dict().keys():
        state = {name.removeprefix(PREFIX): tensor for name, tensor in state.items()}
    try:
        model.net.load_state_dict(state, strict=True)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        hint = "; is it a pruned checkpoint?" if "size mismatch" in reason and not model.spec.widths else ""
        raise PipelineError(f"{path.name} does not fit {model.spec.name}: {reason}{hint}") from error
    return model


def _build_net(spec: ModelSpec) -> nn.Module:
    if spec.dropout and spec.name not in ("simple_cnn", "lenet"):
        raise PipelineError(f"model.dropout = {spec.dropout} is for simple_cnn and lenet; {spec.name} has its own")
    if spec.name in BUILDERS:
        return BUILDERS[spec.name](spec)
    if ":" in spec.name:
        return _build_custom(spec)
    return _build_torchvision(spec)


def _build_custom(spec: ModelSpec) -> nn.Module:
    """Call a user's `module:callable(num_classes=, channels=, height=, width=)`."""
    module_name, _, attribute = spec.name.partition(":")
    try:
        make = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise PipelineError(f"model.name = {spec.name!r}: {error}; is the module on PYTHONPATH?") from error
    net = make(num_classes=spec.num_classes, channels=spec.channels, height=spec.height, width=spec.width)
    if not isinstance(net, nn.Module):
        raise PipelineError(f"model.name = {spec.name!r} returned {type(net).__name__}, not a torch.nn.Module")
    return net


def _build_torchvision(spec: ModelSpec) -> nn.Module:
    from torchvision import models

    names = models.list_models(module=models)
    if spec.name not in names:
        known = ", ".join([*BUILDERS, "module:callable"])
        raise PipelineError(
            f"model.name = {spec.name!r} is neither one of {known} nor a torchvision classification model"
        )
    options: dict[str, int] = {"image_size": spec.height} if spec.name.startswith("vit_") else {}
    if spec.name.startswith("vit_") and (spec.height != spec.width or spec.height % 16):
        raise PipelineError(f"{spec.name} takes square images of a multiple of 16, not {spec.height}x{spec.width}")
    if spec.name in ("inception_v3", "googlenet"):
        raise PipelineError(f"model.name = {spec.name!r} trains with auxiliary heads, which the loop does not have")
    net = cast(nn.Module, models.get_model(spec.name, weights=None, num_classes=spec.num_classes, **options))
    return net if spec.channels == 3 else _with_first_layer(net, spec)


def _with_first_layer(net: nn.Module, spec: ModelSpec) -> nn.Module:
    """Replace the first convolution by one that takes the recipe's channels."""
    name, first = next((n, m) for n, m in net.named_modules() if isinstance(m, nn.Conv2d))
    net.set_submodule(name, resized_conv(first, in_channels=spec.channels))
    return net


def resized_conv(
    conv: nn.Conv2d, *, in_channels: int | None = None, out_channels: int | None = None, groups: int | None = None
) -> nn.Conv2d:
    """Return a convolution with the options of `conv` and other widths, freshly initialised."""
    return nn.Conv2d(
        in_channels or conv.in_channels,
        out_channels or conv.out_channels,
        cast(tuple[int, int], conv.kernel_size),
        stride=cast(tuple[int, int], conv.stride),
        padding=cast(tuple[int, int], conv.padding),
        dilation=cast(tuple[int, int], conv.dilation),
        groups=groups or conv.groups,
        bias=conv.bias is not None,
        padding_mode=conv.padding_mode,
    )


def _require_size(spec: ModelSpec, *, at_least: int) -> None:
    if min(spec.height, spec.width) < at_least:
        raise PipelineError(
            f"{spec.name} takes images of {at_least}x{at_least} or more, not {spec.height}x{spec.width}; "
            "raise data.height and data.width"
        )
