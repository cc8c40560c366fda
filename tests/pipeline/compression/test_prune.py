"""Pruning removes channels for good, and the result is a spec like any other."""

from pathlib import Path

import pytest
import torch

from pipeline.compression.macs import count_macs
from pipeline.compression.prune import Rule, prune
from pipeline.compression.rebuild import rebuild
from pipeline.errors import PipelineError
from pipeline.models import Classifier, ModelSpec, build, load_weights, save_weights
from tests.pipeline.compression.networks import HERE, random_model


def model(name: str = "resnet20", size: int = 16) -> Classifier:
    torch.manual_seed(0)
    channels = 1 if name in ("resnet20", "lenet", "simple_cnn") else 3
    return build(
        ModelSpec(
            name=name,
            num_classes=10,
            channels=channels,
            height=size,
            width=size,
            mean=(0.5,) * channels,
            std=(0.5,) * channels,
        )
    )


def halved(dense: Classifier, **options: object) -> Classifier:
    ratio = options.pop("ratio", 0.5)
    rule = Rule(**({"round_to": 8, "importance": "l2", "scope": "uniform"} | options))  # type: ignore[arg-type]
    return prune(dense, ratio=ratio, rule=rule)  # type: ignore[arg-type]


def test_half_of_the_channels_are_gone_and_the_classes_stay() -> None:
    pruned = halved(model())
    state = pruned.net.state_dict()
    assert state["conv.weight"].shape == (8, 1, 3, 3)
    assert state["layers.8.conv2.weight"].shape == (32, 32, 3, 3)
    assert state["fc.weight"].shape == (10, 32)


@pytest.mark.parametrize("scope", ["uniform", "global"])
def test_channels_that_matter_least_go(scope: str) -> None:
    dense = model("lenet")
    with torch.no_grad():
        for name, layer in dense.net.named_modules():
            if name in ("conv1", "conv2", "fc1"):
                layer.weight[1::2] *= 100
    pruned = halved(dense, round_to=1, scope=scope).net.state_dict()
    for name in ("conv1", "conv2", "fc1"):
        assert torch.equal(pruned[f"{name}.bias"], dense.net.state_dict()[f"{name}.bias"][1::2])


@pytest.mark.parametrize("round_to", [8, 16])
def test_widths_stay_multiples_of_what_the_recipe_says(round_to: int) -> None:
    state = halved(model("resnet18", 32), ratio=0.3, round_to=round_to).net.state_dict()
    widths = {tensor.shape[0] for name, tensor in state.items() if name.endswith("conv1.weight")}
    assert {width % round_to for width in widths} == {0}
    assert max(widths) < 512


def test_multiply_accumulates_fall_to_about_a_quarter() -> None:
    dense = model()
    assert 0.23 < count_macs(halved(dense)) / count_macs(dense) < 0.3


def test_dense_model_is_left_as_it_was() -> None:
    dense = model()
    before = {name: tensor.clone() for name, tensor in dense.net.state_dict().items()}
    halved(dense)
    assert all(torch.equal(before[name], tensor) for name, tensor in dense.net.state_dict().items())


@pytest.mark.parametrize("name", ["simple_cnn", "lenet", "resnet18", "mobilenet_v3_small", "convnext_tiny"])
def test_pruned_network_is_rebuilt_from_spec_and_weights(tmp_path: Path, name: str) -> None:
    pruned = halved(model(name, 32)).eval()
    save_weights(pruned, tmp_path / "w.safetensors")
    spec = ModelSpec.model_validate_json(pruned.spec.model_dump_json())
    again = load_weights(rebuild(spec), tmp_path / "w.safetensors").eval()
    images = torch.randint(0, 256, (2, 32, 32, spec.channels), dtype=torch.uint8)
    assert torch.equal(pruned(images), again(images))


def test_pruned_weights_do_not_load_into_the_dense_network(tmp_path: Path) -> None:
    dense = model()
    save_weights(halved(dense), tmp_path / "w.safetensors")
    with pytest.raises(PipelineError, match="is it a pruned checkpoint"):
        load_weights(build(dense.spec), tmp_path / "w.safetensors")


def test_no_mask_is_left_in_the_weights() -> None:
    assert not [name for name in halved(model()).net.state_dict() if "mask" in name or "orig" in name]


def test_pruning_twice_composes() -> None:
    twice = halved(halved(model(), round_to=4), round_to=4)
    assert twice.net.state_dict()["layers.8.conv2.weight"].shape == (16, 16, 3, 3)
    assert rebuild(twice.spec).net.state_dict()["fc.weight"].shape == (10, 16)


def test_same_network_is_pruned_the_same_way() -> None:
    first, again = (halved(model()).net.state_dict() for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_network_whose_channels_cannot_be_followed_is_refused_by_name() -> None:
    with pytest.raises(PipelineError, match=r"model\.name = '.*:offset' cannot be pruned: RuntimeError"):
        halved(random_model(f"{HERE}:offset"))


def test_network_without_channels_to_spare_is_refused() -> None:
    layers = ("conv", *(f"layers.{n}.conv1" for n in range(9)), "layers.3.conv2", "layers.6.conv2")
    with pytest.raises(PipelineError, match=r"has no channels that can go .* keep = conv, "):
        halved(random_model(channels=1), keep=layers)


def test_ranking_over_all_layers_takes_from_those_that_matter_least() -> None:
    dense = random_model(channels=1)
    with torch.no_grad():
        dense.net.get_parameter("layers.1.conv1.weight")[2:] *= 1e-3
        dense.net.get_parameter("layers.1.conv2.weight")[:, 2:] *= 1e-3
        dense.net.get_parameter("layers.1.bn1.weight")[2:] *= 1e-3
    widths = {
        scope: halved(dense, ratio=0.1, round_to=1, scope=scope).net.state_dict()["layers.1.conv1.weight"].shape[0]
        for scope in ("uniform", "global")
    }
    assert widths == {"uniform": 14, "global": 2}
