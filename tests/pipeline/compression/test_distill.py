"""What a recovering network learns from: the labels, the dense network, or both."""

import torch

from pipeline.compression.distill import DistillObjective
from pipeline.models import ModelSpec, build

SIZE = 16


def test_teacher_alone_decides_when_the_recipe_says_so() -> None:
    spec = ModelSpec(name="lenet", num_classes=3, channels=1, height=SIZE, width=SIZE, mean=(0.5,), std=(0.5,))
    teacher, student = build(spec).eval(), build(spec).eval()
    objective = DistillObjective(teacher, weight=1.0, temperature=2.0)
    pixels = torch.randint(0, 256, (4, SIZE, SIZE, 1), dtype=torch.uint8)
    for labels in (torch.zeros(4, dtype=torch.int64), torch.ones(4, dtype=torch.int64)):
        assert torch.equal(objective(student, pixels, labels), objective(student, pixels, 1 - labels))
