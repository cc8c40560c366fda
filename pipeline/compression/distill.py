"""What a pruned network learns from while it recovers: the labels and the dense network's answers.

Shape legend: B images of a batch, H height, W width, C channels, K classes.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.models import Classifier


@dataclass(frozen=True)
class DistillObjective:
    """Cross-entropy against the labels, mixed with the teacher's softened answers: Hinton et al. (2015), section 2."""

    teacher: Classifier
    weight: float
    temperature: float

    def __call__(self, model: nn.Module, images_BHWC: Tensor, labels_B: Tensor) -> Tensor:
        """Return the loss of each image [B]."""
        logits_BK = model(images_BHWC)
        with torch.no_grad():
            target_BK = F.softmax(self.teacher(images_BHWC) / self.temperature, dim=-1)
        soft_B = F.cross_entropy(logits_BK / self.temperature, target_BK, reduction="none") * self.temperature**2
        return self.weight * soft_B + (1 - self.weight) * F.cross_entropy(logits_BK, labels_B, reduction="none")
