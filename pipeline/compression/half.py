"""Networks in float16, for GPUs: pixels are normalised, and logits compared, in float32."""

import copy
from typing import cast

from torch import Tensor, nn

from pipeline.models import Classifier


class Half(nn.Module):
    """A network that computes in float16 between float32 inputs and float32 logits."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = copy.deepcopy(net).half()

    def forward(self, x: Tensor) -> Tensor:
        """Return float32 logits [B, K] for float32 [B, C, H, W]."""
        return cast(Tensor, self.net(x.half())).float()


def in_half(model: Classifier) -> Classifier:
    """Return a copy of the model, in inference mode, whose network computes in float16.

    A weight beyond 65,504 becomes infinite there, which export refuses.
    """
    return Classifier(model.spec, Half(model.net)).eval()
