"""Each importance finds the channels that do not matter by its own measure, and says so when it has none."""

import pytest
import torch
from torch import nn

from pipeline.compression.channels import find_groups
from pipeline.compression.importance import lay_gradients, score
from pipeline.compression.prune import Rule, prune
from pipeline.errors import PipelineError
from tests.pipeline.compression.networks import random_model


def judged(first: nn.Conv2d, second: nn.Conv2d, kind: str, *, norm: nn.BatchNorm2d | None = None) -> list[float]:
    net = nn.Sequential(first, norm or nn.Identity(), second)
    (group,) = find_groups(net, torch.zeros(2, first.in_channels, 4, 4), keep=())
    scores = score(group, kind)
    assert scores is not None
    return scores.tolist()


def pair() -> tuple[nn.Conv2d, nn.Conv2d]:
    """Two convolutions of one weight for each channel: 1, -2 put them out; 3, 1 read them."""
    first, second = nn.Conv2d(1, 2, 1, bias=False), nn.Conv2d(2, 1, 1, bias=False)
    with torch.no_grad():
        first.weight.copy_(torch.tensor([1.0, -2.0]).view(2, 1, 1, 1))
        second.weight.copy_(torch.tensor([3.0, 1.0]).view(1, 2, 1, 1))
    return first, second


def test_l1_sums_magnitudes_over_the_layers_that_hang_together() -> None:
    assert judged(*pair(), "l1") == pytest.approx([8 / 7, 6 / 7])  # 1 + 3 against 2 + 1


def test_l2_sums_squares() -> None:
    assert judged(*pair(), "l2") == pytest.approx([2 * 10 / 15, 2 * 5 / 15])  # 1 + 9 against 4 + 1


def test_taylor_weighs_with_gradients() -> None:
    first, second = pair()
    net = nn.Sequential(first, nn.Identity(), second)
    lay_gradients(net, {"0.weight": torch.tensor([0.0, 1.0]).view(2, 1, 1, 1), "2.weight": torch.ones(1, 2, 1, 1)})
    assert judged(first, second, "taylor") == pytest.approx([1.0, 1.0])  # 0 + 3 against 2 + 1


def test_bn_scale_looks_at_batch_norm_alone() -> None:
    norm = nn.BatchNorm2d(2)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([-1.0, 3.0]))
    assert judged(*pair(), "bn_scale", norm=norm) == pytest.approx([0.5, 1.5])


def test_inputs_of_a_grouped_convolution_are_those_of_their_own_part() -> None:
    first, second = nn.Conv2d(1, 4, 1, bias=False), nn.Conv2d(4, 4, 1, groups=2, bias=False)
    with torch.no_grad():
        first.weight.zero_()
        second.weight.copy_(torch.tensor([[1.0, 0], [1, 0], [0, 2], [0, 2]]).view(4, 2, 1, 1))
    net = nn.Sequential(first, second, nn.Conv2d(4, 1, 1))
    group = next(g for g in find_groups(net, torch.zeros(2, 1, 4, 4), keep=()) if g.name == "0")
    scores = score(group, "l1")
    assert scores is not None
    assert scores.tolist() == pytest.approx([2 / 3, 4 / 3])  # channels 0 and 2 go together, and so do 1 and 3


def test_network_without_batch_norm_refuses_its_scales() -> None:
    with pytest.raises(PipelineError, match=r"importance = 'bn_scale', but this network has no BatchNorm; use l1"):
        prune(random_model("lenet", channels=1), ratio=0.5, rule=Rule(8, "bn_scale", "uniform"))


def test_layer_without_batch_norm_keeps_its_channels_when_scales_decide() -> None:
    pruned = prune(random_model("mobilenet_v3_small", 32), ratio=0.5, rule=Rule(8, "bn_scale", "uniform"))
    assert pruned.net.state_dict()["classifier.0.weight"].shape == (1024, 288)
    assert pruned.net.state_dict()["features.0.0.weight"].shape[0] == 8
