"""Recipes: every shipped one is valid, and each wrong value gets one line that names it."""

import re
from pathlib import Path

import pytest

from pipeline.config import RECIPES, describe_fields, load_recipe, section_facts
from pipeline.errors import PipelineError
from tests.given import graph_text, write_graph


@pytest.mark.parametrize("name", sorted(path.stem for path in RECIPES.glob("*.toml") if path.stem != "onnx"))
def test_shipped_recipe_is_valid(name: str) -> None:
    assert load_recipe(name).package.name


def test_size_comes_from_the_graph_that_a_recipe_names(tmp_path: Path) -> None:
    recipe = load_recipe("onnx", ["--onnx.file", str(write_graph(tmp_path)), "--onnx.mean", "0.5,0.4,0.3"])
    assert (recipe.data.height, recipe.data.width, recipe.data.channels) == (16, 16, 3)
    assert recipe.onnx is not None
    assert recipe.onnx.mean == (0.5, 0.4, 0.3)


def test_recipe_that_names_a_graph_is_not_asked_for_training(tmp_path: Path) -> None:
    recipe = load_recipe("digits", [*graph(tmp_path, "N, 1, 16, 16"), "--train.nproc", "2"])
    assert (recipe.data.name, recipe.package.name) == ("digits", "digits")
    assert [getattr(recipe, name) for name in ("model", "train", "compress")] == [None] * 3


def graph(folder: Path, shape: str) -> list[str]:
    return ["--onnx.file", str(write_graph(folder, graph_text(shape=shape)))]


@pytest.mark.parametrize(
    ("recipe", "shape", "words", "message"),
    [
        ("digits", "N, 1, 32, 16", [], r"data\.height = 16, but the ONNX file takes 32; leave data\.height out"),
        ("digits", "N, 3, 16, 16", [], r"data\.channels = 1, but the ONNX file takes 3; leave data\.channels out"),
        ("onnx", "N, 3, H, 16", [], r"recipe onnx\.toml: data\.height is required and not set"),
        (
            "onnx",
            "N, 3, 16, 16",
            ["--onnx.mean", "1,2"],
            r"onnx\.mean = \(1\.0, 2\.0\) has another length than 1 or data",
        ),
        ("onnx", "N, 3, 16, 16", ["--onnx.std", "0"], r"onnx\.std\.0 = '0': input should be greater than 0"),
        ("onnx", "N, 3, 16, 16", ["--onnx.size", "3"], r"there is no field onnx\.size"),
        ("onnx", "N, 16", [], r"its input x is no batch of images"),
    ],
)
def test_graph_that_the_recipe_contradicts_is_refused(
    tmp_path: Path, recipe: str, shape: str, words: list[str], message: str
) -> None:
    with pytest.raises(PipelineError, match=message):
        load_recipe(recipe, [*graph(tmp_path, shape), *words])


def test_recipe_without_a_network_and_without_a_graph_is_refused() -> None:
    size = ["--data.height=8", "--data.width=8", "--data.channels=1"]
    with pytest.raises(PipelineError, match=r"section \[model\] is required and not set; .* or pass --onnx FILE"):
        load_recipe("onnx", size)


def test_mnist_recipe_is_the_classic() -> None:
    recipe = load_recipe("mnist")
    assert (recipe.model.name, recipe.train.optimizer, recipe.train.lr) == ("simple_cnn", "adam", 1e-3)
    assert (recipe.train.batch_size, recipe.train.epochs) == (64, 5)


def test_override_wins_over_the_file() -> None:
    words = ["--train.epochs", "3", "--train.lr=0.5", "--data.augment", "flip,crop", "--data.channels=3"]
    recipe = load_recipe("digits", words)
    assert (recipe.train.epochs, recipe.train.lr, recipe.data.augment) == (3, 0.5, ("flip", "crop"))
    assert recipe.data.channels == 3


def test_recipe_of_ones_own_is_read_by_path(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text((RECIPES / "digits.toml").read_text().replace('name = "resnet20"', 'name = "lenet"'))
    assert load_recipe(str(path)).model.name == "lenet"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--train.epochs", "many"], r"^train\.epochs = 'many': input should be a valid integer"),
        (["--train.epochs", "0"], r"train\.epochs = '0': input should be greater than or equal to 1"),
        (["--train.epoch", "3"], r"there is no field train\.epoch; `python -m pipeline --help` lists them"),
        (["--data.name", "imagenet"], r"data\.name = 'imagenet': input should be 'digits', "),
        (["--data.resize", "8"], r"^data\.resize = 8 is smaller than the crop"),
        (["--data.channels", "2"], r"data\.channels = 2: input should be 1 or 3"),
        (["--train.epochs"], r"--train\.epochs has no value"),
        (["epochs=3"], r"'epochs=3' is not understood; an override reads --section\.field value"),
        (["--package.name", "my model"], r"package\.name = 'my model' cannot be used; use A-Z"),
        (["--package.name", "-x"], r"package\.name = '-x'"),
        (["--package.name="], r"package\.name = ''"),
        (["--package.version", "1.0 beta"], r"package\.version = '1\.0 beta'"),
    ],
)
def test_wrong_value_gets_one_line_that_names_it(overrides: list[str], message: str) -> None:
    with pytest.raises(PipelineError, match=message) as caught:
        load_recipe("digits", overrides)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_status == 2


def test_value_written_in_the_recipe_names_the_recipe(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text((RECIPES / "digits.toml").read_text().replace("epochs = 15", 'epochs = "many"'))
    with pytest.raises(PipelineError, match=r"^recipe own\.toml: train\.epochs = 'many'"):
        load_recipe(str(path), ["--train.lr", "0.1"])


def test_file_that_is_no_recipe_is_told_from_one_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("")
    with pytest.raises(PipelineError, match=r"notes' is no \.toml file"):
        load_recipe(str(tmp_path / "notes"))


def test_unknown_recipe_lists_those_that_there_are() -> None:
    with pytest.raises(PipelineError, match=r"recipe 'digit' not found; .* cifar10, digits, imagefolder"):
        load_recipe("digit")


def test_recipe_that_is_no_toml_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("[data\n")
    with pytest.raises(PipelineError, match=r"bad\.toml: "):
        load_recipe(str(path))


def test_required_field_that_is_missing_is_named(tmp_path: Path) -> None:
    path = tmp_path / "short.toml"
    path.write_text((RECIPES / "digits.toml").read_text().replace("epochs = 15\n", ""))
    with pytest.raises(PipelineError, match=r"train\.epochs is required and not set"):
        load_recipe(str(path))


def test_folder_of_the_images_is_no_part_of_what_decides_the_key() -> None:
    here = load_recipe("imagefolder", ["--data.root", "here"])
    there = load_recipe("imagefolder", ["--data.root", "there"])
    assert section_facts(here, ["data"]) == section_facts(there, ["data"])


def test_help_has_a_line_for_every_field() -> None:
    lines = describe_fields()
    assert len({len(line) - len(re.sub(r"^  \S+ +", "", line)) for line in lines}) == 1
    assert not [line for line in lines if line.endswith(".")]  # every field says what it means
    text = "\n".join(lines)
    for field in ("--data.root", "--onnx.file", "--train.nproc", "--compress.prune.ratio", "--choose.force"):
        assert field in text
