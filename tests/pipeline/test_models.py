"""A network is a spec and safetensors: rebuilt exactly, or refused with what is missing."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from pipeline.errors import PipelineError
from pipeline.models import ModelSpec, build, load_weights, save_weights


def spec(name: str, **fields: object) -> ModelSpec:
    base = {"name": name, "num_classes": 10, "channels": 1, "height": 28, "width": 28, "mean": (0.5,), "std": (0.25,)}
    return ModelSpec.model_validate(base | fields)


COLOUR = {"channels": 3, "mean": (0.5, 0.5, 0.5), "std": (0.2, 0.2, 0.2)}


def tiny_net(*, num_classes: int, channels: int, height: int, width: int) -> nn.Module:
    """A user's own network, as `tests.pipeline.test_models:tiny_net`."""
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * height * width, num_classes))


@pytest.mark.parametrize(
    ("fields", "parameters"),
    [
        ({"name": "simple_cnn"}, 32 * 9 + 32 + 26 * 26 * 32 * 10 + 10),
        ({"name": "lenet"}, 10 * 25 + 10 + 20 * 10 * 25 + 20 + 320 * 50 + 50 + 50 * 10 + 10),
        ({"name": "resnet20", "height": 32, "width": 32} | COLOUR, 272_474),
        ({"name": "resnet56", "height": 32, "width": 32} | COLOUR, 855_770),
        ({"name": "tests.pipeline.test_models:tiny_net"}, 28 * 28 * 10 + 10),
        ({"name": "resnet18", "num_classes": 1000, "height": 64, "width": 64} | COLOUR, 11_689_512),
    ],
)
def test_network_has_the_parameters_of_its_definition(fields: dict[str, object], parameters: int) -> None:
    model = build(spec(**fields))  # type: ignore[arg-type]  # fields always holds a name
    assert sum(p.numel() for p in model.parameters()) == parameters
    shape = (2, model.spec.height, model.spec.width, model.spec.channels)
    assert model.eval()(torch.zeros(shape, dtype=torch.uint8)).shape == (2, model.spec.num_classes)


def test_first_layer_of_a_torchvision_network_takes_grey_images() -> None:
    model = build(spec("resnet18", height=64, width=64)).eval()
    assert model(torch.zeros(1, 64, 64, 1, dtype=torch.uint8)).shape == (1, 10)


def test_pixels_are_normalised_by_the_numbers_of_the_spec() -> None:
    model = build(spec("simple_cnn", mean=(0.2,), std=(0.5,)))
    white = torch.full((1, 28, 28, 1), 255, dtype=torch.uint8)
    assert model.normalise(white).flatten().tolist() == pytest.approx([1.6] * 784)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "resnet1000"}, r"model\.name = 'resnet1000' is neither one of simple_cnn"),
        ({"name": "nowhere:net"}, r"model\.name = 'nowhere:net': No module named 'nowhere'"),
        ({"name": "pipeline.models:nothing"}, "has no attribute 'nothing'"),
        ({"name": "builtins:dict"}, "returned dict, not a torch.nn.Module"),
        ({"name": "lenet", "height": 12}, "lenet takes images of 16x16 or more, not 12x28; raise data.height"),
        ({"name": "vit_b_16", "height": 30, "width": 30} | COLOUR, "vit_b_16 takes square images of a multiple of 16"),
        ({"name": "resnet20", "dropout": 0.5}, r"model\.dropout = 0\.5 is for simple_cnn and lenet"),
        ({"name": "inception_v3"} | COLOUR, "auxiliary heads"),
    ],
)
def test_network_that_cannot_be_built_is_refused_by_name(fields: dict[str, object], message: str) -> None:
    with pytest.raises(PipelineError, match=message):
        build(spec(**fields))  # type: ignore[arg-type]  # fields always holds a name


def test_weights_come_back_as_they_were_saved(tmp_path: Path) -> None:
    model = build(spec("lenet"))
    save_weights(model, tmp_path / "w.safetensors")
    again = load_weights(build(model.spec), tmp_path / "w.safetensors")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_same_weights_give_the_same_file(tmp_path: Path) -> None:
    model = build(spec("resnet20", height=16, width=16))
    for name in "ab":
        save_weights(model, tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize("prefix", ["module.", "module.module."])
def test_checkpoint_of_a_wrapped_model_loads_without_its_prefix(tmp_path: Path, prefix: str) -> None:
    model = build(spec("lenet"))
    save_file({prefix + name: tensor for name, tensor in model.net.state_dict().items()}, tmp_path / "w.safetensors")
    again = load_weights(build(model.spec), tmp_path / "w.safetensors")
    assert torch.equal(again.net.state_dict()["fc2.weight"], model.net.state_dict()["fc2.weight"])


def with_submodule_called_module(*, num_classes: int, channels: int, height: int, width: int) -> nn.Module:
    """A user's network whose own names begin like a wrapper's."""
    net = nn.Sequential()
    net.add_module("module", nn.Sequential(nn.Flatten(), nn.Linear(channels * height * width, num_classes)))
    return net


def test_network_with_a_submodule_called_module_loads(tmp_path: Path) -> None:
    model = build(spec("tests.pipeline.test_models:with_submodule_called_module"))
    save_weights(model, tmp_path / "w.safetensors")
    load_weights(build(model.spec), tmp_path / "w.safetensors")


def test_our_files_have_no_prefix(tmp_path: Path) -> None:
    save_weights(build(spec("lenet")), tmp_path / "w.safetensors")
    assert "conv1.weight" in load_file(tmp_path / "w.safetensors")


def test_missing_and_unexpected_weights_are_listed(tmp_path: Path) -> None:
    state = dict(build(spec("lenet")).net.state_dict())
    state["fc3.weight"] = state.pop("fc2.weight")
    save_file(state, tmp_path / "w.safetensors")
    with pytest.raises(PipelineError, match=r'Missing key\(s\).*"fc2\.weight".*Unexpected key\(s\).*"fc3\.weight"'):
        load_weights(build(spec("lenet")), tmp_path / "w.safetensors")
