"""Multiply-accumulates are those of the definition, of the network and of each layer that gets narrower."""

import pytest
import torch

from pipeline.compression.macs import count_macs, layer_macs
from tests.pipeline.compression.networks import HERE, random_model


def test_macs_are_those_of_the_definition() -> None:
    model = random_model("simple_cnn", 28, channels=1)
    assert count_macs(model) == 26 * 26 * 32 * 9 + 26 * 26 * 32 * 10


def test_layers_add_up_to_the_network() -> None:
    model = random_model("mobilenet_v3_small", 64)  # depthwise layers, too
    layers = layer_macs(model)
    assert sum(layer.saved(layer.inputs, layer.outputs) for layer in layers) == count_macs(model)
    assert any(layer.depthwise for layer in layers)


def test_attention_counts_its_projections() -> None:
    """Two layers of 5 tokens and 32 values: q, k, v and the output, and a hidden layer of 64."""
    model = random_model(f"{HERE}:small_vit", 32)
    layer = 5 * 32 * 32 * 4 + 2 * 5 * 32 * 64
    assert count_macs(model) == 4 * 32 * 16 * 16 * 3 + 2 * layer + 32 * 10


@pytest.mark.parametrize(("inputs", "outputs", "left"), [(16, 0, 0.5), (0, 16, 0.5), (16, 16, 0.25)])
def test_half_of_the_channels_saves_half_and_both_halves_three_quarters(inputs: int, outputs: int, left: float) -> None:
    (layer,) = [x for x in layer_macs(random_model()) if x.name == "layers.4.conv1"]  # 32 x 32 channels, 3 x 3
    assert layer.saved(inputs, outputs) == (1 - left) * layer.positions * 32 * 32 * 9


def test_counting_gives_the_mode_back() -> None:
    model = random_model().train()
    count_macs(model)
    assert model.training
    assert torch.backends.mha.get_fastpath_enabled()
