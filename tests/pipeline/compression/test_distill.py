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


def test_loss_mixes_both_and_keeps_the_softened_gradients_as_large_as_the_others() -> None:
    """Hinton et al. (2015), section 2: softened gradients shrink with 1/T^2, so they are multiplied by T^2."""
    spec = ModelSpec(name="lenet", num_classes=3, channels=1, height=SIZE, width=SIZE, mean=(0.5,), std=(0.5,))
    teacher, student = build(spec).eval(), build(spec).eval()
    pixels, labels = torch.randint(0, 256, (4, SIZE, SIZE, 1), dtype=torch.uint8), torch.tensor([0, 1, 2, 0])
    loss_B = DistillObjective(teacher, weight=0.25, temperature=4.0)(student, pixels, labels)
    with torch.no_grad():
        soft = -((teacher(pixels) / 4).softmax(1) * (student(pixels) / 4).log_softmax(1)).sum(1)
        hard = -student(pixels).log_softmax(1)[torch.arange(4), labels]
    assert torch.allclose(loss_B, 0.25 * 16 * soft + 0.75 * hard)
