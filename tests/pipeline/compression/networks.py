"""Small networks for the tests of pruning: `module:callable` as a recipe names them, and random models of any name."""

import torch
from torch import Tensor, nn
from torchvision.models import VisionTransformer

from pipeline.models import Classifier, ModelSpec, build

HERE = "tests.pipeline.compression.networks"


class HeadFirst(nn.Module):
    """Its classes are put out by the layer that was registered first, and an inner layer has as many outputs."""

    def __init__(self, num_classes: int, channels: int) -> None:
        super().__init__()
        self.fc = nn.Linear(16, num_classes)
        self.first = nn.Conv2d(channels, 16, 3)
        self.norm = nn.GroupNorm(2, 16)
        self.second = nn.Conv2d(16, num_classes, 1)
        self.third = nn.Conv2d(num_classes, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, K]."""
        y: Tensor = self.fc(self.third(self.second(self.norm(self.first(x)))).mean((2, 3)))
        return y


def head_first(*, num_classes: int, channels: int, height: int, width: int) -> nn.Module:
    """Return `HeadFirst`."""
    return HeadFirst(num_classes, channels)


def small_vit(*, num_classes: int, channels: int, height: int, width: int) -> nn.Module:
    """Return a vision transformer of two layers, with a head that is not all zeros."""
    net: nn.Module = VisionTransformer(height, 16, 2, 2, hidden_dim=32, mlp_dim=64, num_classes=num_classes)
    nn.init.normal_(net.get_parameter("heads.head.weight"))
    return net


class Offset(nn.Module):
    """It adds a table of its own to its channels, which nobody knows to have as many entries."""

    offset: Tensor

    def __init__(self, num_classes: int, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, 16, 3)
        self.fc = nn.Linear(16, num_classes)
        self.register_buffer("offset", torch.ones(16, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, K]."""
        logits_BK: Tensor = self.fc((self.first(x) + self.offset).mean((2, 3)))
        return logits_BK


def offset(*, num_classes: int, channels: int, height: int, width: int) -> nn.Module:
    """Return `Offset`."""
    return Offset(num_classes, channels)


def random_model(name: str = "resnet20", size: int = 16, *, channels: int = 3) -> Classifier:
    """Return a network with random weights, in inference mode."""
    torch.manual_seed(0)
    spec = ModelSpec(
        name=name, num_classes=10, channels=channels, height=size, width=size, mean=(0.5,) * channels,
        std=(0.5,) * channels,
    )  # fmt: skip
    return build(spec).eval()
