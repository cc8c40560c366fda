"""A network is rebuilt from what its spec records: widths of layers, of normalisations and of bare parameters."""

import pytest
import torch

from pipeline.compression.rebuild import changed_widths, rebuild
from pipeline.errors import PipelineError
from pipeline.models import build
from tests.pipeline.compression.networks import HERE, random_model


def test_dense_spec_gives_the_dense_network() -> None:
    model = random_model("resnet20")
    assert changed_widths(model.net, model.spec) == {}
    state = rebuild(model.spec).net.state_dict()
    assert {n: t.shape for n, t in state.items()} == {n: t.shape for n, t in model.net.state_dict().items()}


@pytest.mark.parametrize(
    ("name", "widths", "parameter", "shape"),
    [
        ("resnet20", {"layers.0.conv1": {"out_channels": 8}}, "layers.0.conv1.weight", (8, 16, 3, 3)),
        ("resnet20", {"layers.0.bn1": {"num_features": 8}}, "layers.0.bn1.running_var", (8,)),
        ("mobilenet_v3_small", {"features.1.block.0.0": {"groups": 4, "in_channels": 4, "out_channels": 4}},
         "features.1.block.0.0.weight", (4, 1, 3, 3)),
        ("resnet20", {"fc": {"in_features": 8}}, "fc.weight", (10, 8)),
        ("convnext_tiny", {"features.1.0.block.2": {"normalized_shape": 48}}, "features.1.0.block.2.bias", (48,)),
        ("convnext_tiny", {"features.1.0.layer_scale": {"0": 48}}, "features.1.0.layer_scale", (48, 1, 1)),
    ],
)  # fmt: skip
def test_recorded_width_is_the_width_that_is_built(
    name: str, widths: dict[str, dict[str, int]], parameter: str, shape: tuple[int, ...]
) -> None:
    spec = random_model(name, 32).spec.model_copy(update={"widths": widths})
    net = rebuild(spec).net
    assert net.state_dict()[parameter].shape == shape
    recorded = changed_widths(net, spec)
    assert recorded.keys() == widths.keys()
    assert rebuild(spec.model_copy(update={"widths": recorded})).net.state_dict()[parameter].shape == shape


def test_recorded_int8_layer_is_built_as_one() -> None:
    spec = random_model("lenet", 16, channels=1).spec.model_copy(update={"int8": {"fc1": 7}})
    assert rebuild(spec).net.state_dict()["fc1.weight"].dtype == torch.int8
    assert build(spec).net.state_dict()["fc1.weight"].dtype == torch.float32


def test_layer_whose_width_cannot_change_is_refused_by_name() -> None:
    spec = random_model(f"{HERE}:small_vit", 32).spec
    layer = "encoder.layers.encoder_layer_0.self_attention"
    with pytest.raises(PipelineError, match=rf"layer {layer} of kind MultiheadAttention cannot change its width"):
        rebuild(spec.model_copy(update={"widths": {layer: {"embed_dim": 16}}}))
