"""What hangs together goes together: a network whose odd channels are dead answers the same without them."""

import pytest
import torch
from torch import nn

from pipeline.compression.channels import find_groups, is_depthwise
from pipeline.compression.macs import count_macs
from pipeline.compression.prune import Rule, prune
from pipeline.errors import PipelineError
from pipeline.models import Classifier
from tests.pipeline.compression.networks import HERE, random_model

ALL = Rule(round_to=1, importance="l2", scope="uniform")
FAMILIES = [
    ("resnet18", 32),
    ("resnext50_32x4d", 32),
    ("regnet_y_400mf", 32),
    ("mobilenet_v3_small", 32),
    ("efficientnet_b0", 32),
    ("squeezenet1_1", 48),
    ("shufflenet_v2_x0_5", 32),
    ("swin_t", 32),
    (f"{HERE}:small_vit", 32),
]


@torch.no_grad()
def kill_odd_channels(model: Classifier) -> None:
    """Make every layer put out zeros in its odd channels, and read nothing from them; the classes live."""
    layers = [m for m in model.net.modules() if isinstance(m, nn.Conv2d | nn.Linear | nn.BatchNorm2d)]
    head = next(m for m in reversed(layers) if not isinstance(m, nn.BatchNorm2d) and m.weight.shape[0] == 10)
    for layer in layers:
        if layer is not head:
            layer.weight[1::2] = 0
            if layer.bias is not None:
                layer.bias[1::2] = 0
        if isinstance(layer, nn.Conv2d | nn.Linear) and layer.weight.shape[1] % 2 == 0:
            layer.weight[:, 1::2] = 0


@pytest.mark.parametrize(("name", "size"), FAMILIES)
def test_channels_that_are_dead_can_go_without_changing_an_answer(name: str, size: int) -> None:
    dense = random_model(name, size)
    kill_odd_channels(dense)
    pruned = prune(dense, ratio=0.5, rule=ALL)
    images = torch.randint(0, 256, (4, size, size, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, answers = dense(images), pruned(images)
    assert float((expected - answers).abs().max()) <= 1e-3 * float(expected.std(0).max())
    assert count_macs(pruned) < 0.96 * count_macs(dense)  # at this size a Swin mostly pads its windows


def test_layer_scale_and_layer_norm_go_with_their_channels() -> None:
    dense = random_model("convnext_tiny", 32)
    pruned = prune(dense, ratio=0.5, rule=ALL)
    state = pruned.net.state_dict()
    assert state["features.1.0.layer_scale"].shape == (48, 1, 1)
    assert state["features.1.0.block.2.weight"].shape == (48,)
    assert pruned.spec.widths["features.1.0.layer_scale"] == {"0": 48}
    assert count_macs(pruned) < 0.3 * count_macs(dense)


def test_attention_keeps_its_width_and_the_hidden_layers_of_its_blocks_go() -> None:
    pruned = prune(random_model(f"{HERE}:small_vit", 32), ratio=0.5, rule=ALL)
    assert pruned.spec.widths == {
        f"encoder.layers.encoder_layer_{n}.mlp.{layer}": {"in_features": inputs, "out_features": outputs}
        for n in (0, 1)
        for layer, inputs, outputs in ((0, 32, 32), (3, 32, 32))
    }


def test_classes_stay_whatever_the_order_in_which_layers_were_made() -> None:
    state = prune(random_model(f"{HERE}:head_first"), ratio=0.5, rule=ALL).net.state_dict()
    assert state["fc.weight"].shape == (10, 8)
    assert state["second.weight"].shape == (5, 8, 1, 1)
    assert state["norm.weight"].shape == (8,)


def test_grouped_convolution_loses_the_same_channels_of_each_part() -> None:
    net = random_model("resnext50_32x4d", 32).net
    (group,) = (g for g in find_groups(net, torch.zeros(2, 3, 32, 32), keep=()) if g.name == "layer1.0.conv1")
    assert (group.width, group.parts) == (128, 32)
    assert group.allowed(16) == [64, 96, 128]


@pytest.mark.parametrize(
    ("width", "round_to", "widths"),
    [
        (64, 16, [16, 32, 48, 64]),
        (16, 16, [8, 16]),
        (16, 8, [8, 16]),
        (10, 8, [4, 8, 10]),
        (20, 8, [8, 16, 20]),
        (24, 12, [12, 24]),
        (1, 8, [1]),
    ],
)
def test_alignment_adapts_to_how_wide_a_layer_is(width: int, round_to: int, widths: list[int]) -> None:
    net = nn.Sequential(nn.Conv2d(3, width, 1), nn.Conv2d(width, 4, 1))
    (group,) = find_groups(net, torch.zeros(2, 3, 4, 4), keep=())
    assert group.allowed(round_to) == widths


def test_layer_keeps_a_tenth_of_its_channels() -> None:
    net = nn.Sequential(nn.Conv2d(3, 100, 1), nn.Conv2d(100, 4, 1))
    (group,) = find_groups(net, torch.zeros(2, 3, 4, 4), keep=())
    assert group.allowed(1)[0] == 10


def test_kept_layer_keeps_its_channels_with_all_that_hangs_together_with_it() -> None:
    dense = random_model(channels=1)
    pruned = prune(dense, ratio=0.5, rule=Rule(8, "l2", "uniform", keep=("layers.1.conv2", "layers.4.conv1")))
    state = pruned.net.state_dict()
    assert state["conv.weight"].shape[0] == 16  # the residual stream of layers.1
    assert state["layers.4.conv1.weight"].shape[0] == 32
    assert state["layers.5.conv1.weight"].shape[0] == 16


def test_unknown_name_to_keep_is_refused_with_names_that_are_near() -> None:
    with pytest.raises(PipelineError, match=r"keep = 'layers\.1\.conv3' is no layer.*near: .*layers\.1\.conv1"):
        prune(random_model(channels=1), ratio=0.5, rule=Rule(8, "l2", "uniform", keep=("layers.1.conv3",)))


def test_depthwise_convolution_is_told_from_a_grouped_one() -> None:
    assert is_depthwise(nn.Conv2d(8, 8, 3, groups=8))
    assert not is_depthwise(nn.Conv2d(8, 16, 3, groups=8))
    assert not is_depthwise(nn.Conv2d(8, 8, 3, groups=2))
