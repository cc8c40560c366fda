"""Small networks for tests, and how ONNX Runtime runs them: exported by the ordinary exporter, opened as served."""

from pathlib import Path
from typing import cast

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torchvision.models import VisionTransformer

from pipeline.bench.dynamic import export
from pipeline.session import open_session


def exported(net: nn.Module, shape: tuple[int, ...], path: Path) -> onnxruntime.InferenceSession:
    """Export a network that takes float32 [B, *shape], and open it."""
    export(net, shape, path)
    return open_session(path)


def answer(session: onnxruntime.InferenceSession, x: Tensor) -> NDArray[np.float32]:
    """Return the output for a batch."""
    y: NDArray[np.float32] = session.run(["y"], {"x": x.numpy()})[0]
    return y


def vit(*, num_classes: int = 4, channels: int = 3, height: int = 16, width: int = 16) -> nn.Module:
    """Return a ViT of one block of 16 channels and two heads, for images of 16 pixels."""
    assert (channels, height, width) == (3, 16, 16)
    torch.manual_seed(0)
    net = VisionTransformer(
        image_size=16, patch_size=8, num_layers=1, num_heads=2, hidden_dim=16, mlp_dim=32, num_classes=num_classes
    )
    nn.init.normal_(net.heads.head.weight)  # torchvision's zeros would make every answer equal
    return cast(nn.Module, net.eval())


def mlp() -> nn.Module:
    """Return an MLP of 48 inputs and 4 outputs."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 4)).eval()
