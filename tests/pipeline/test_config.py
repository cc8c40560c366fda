"""Recipes: every shipped one is valid, and each wrong value gets one line that names it."""

from pathlib import Path

import pytest

from pipeline.config import RECIPES, describe_fields, load_recipe, section_facts
from pipeline.errors import PipelineError


@pytest.mark.parametrize("name", sorted(path.stem for path in RECIPES.glob("*.toml")))
def test_shipped_recipe_is_valid(name: str) -> None:
    assert load_recipe(name).package.name


def test_mnist_recipe_is_the_classic() -> None:
    recipe = load_recipe("mnist")
    assert (recipe.model.name, recipe.train.optimizer, recipe.train.lr) == ("simple_cnn", "adam", 1e-3)
    assert (recipe.train.batch_size, recipe.train.epochs) == (64, 5)


def test_override_wins_over_the_file() -> None:
    recipe = load_recipe("digits", ["--train.epochs", "3", "--train.lr=0.5", "--data.augment", "flip,crop"])
    assert (recipe.train.epochs, recipe.train.lr, recipe.data.augment) == (3, 0.5, ("flip", "crop"))


def test_recipe_of_ones_own_is_read_by_path(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text((RECIPES / "digits.toml").read_text().replace('name = "resnet20"', 'name = "lenet"'))
    assert load_recipe(str(path)).model.name == "lenet"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--train.epochs", "many"], r"recipe digits\.toml: train\.epochs = 'many': input should be a valid integer"),
        (["--train.epochs", "0"], r"train\.epochs = '0': input should be greater than or equal to 1"),
        (["--train.epoch", "3"], r"there is no field train\.epoch; `python -m pipeline --help` lists them"),
        (["--data.name", "imagenet"], r"data\.name = 'imagenet': input should be 'digits', "),
        (["--data.resize", "8"], r"data\.resize = 8 is smaller than the crop"),
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
    text = "\n".join(describe_fields())
    for field in ("--data.root", "--train.nproc", "--compress.prune.ratio", "--choose.force"):
        assert field in text
