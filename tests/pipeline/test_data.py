"""Splits are fixed, stratified and disjoint; class names come from train/ and are mapped by name."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pipeline.config import DataConfig
from pipeline.data import DataSet, open_dataset
from pipeline.errors import PipelineError

COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}


def config(**fields: object) -> DataConfig:
    return DataConfig.model_validate({"name": "imagefolder", "height": 8, "width": 8, "channels": 3} | fields)


def fill(folder: Path, name: str, count: int, *, suffix: str = "png") -> None:
    (folder / name).mkdir(parents=True)
    for number in range(count):
        shade = tuple(max(0, value - number) for value in COLOURS[name])
        Image.new("RGB", (8, 8), shade).save(folder / name / f"{number}.{suffix}")


def digits(cache: Path, **fields: object) -> DataSet:
    return open_dataset(config(name="digits", channels=1, **fields), cache=cache)


def test_digits_splits_are_disjoint_and_cover_the_data_set(tmp_path: Path) -> None:
    dataset = digits(tmp_path)
    parts = [dataset.train.indices, dataset.val.indices, dataset.test.indices]
    assert sorted(np.concatenate(parts).tolist()) == list(range(1797))


def test_every_class_has_its_share_in_every_split(tmp_path: Path) -> None:
    dataset = digits(tmp_path, validation=0.2, test=0.2)
    for split in (dataset.val, dataset.test):
        counts = np.bincount(split.labels, minlength=10)
        assert counts.min() >= 34
        assert counts.max() <= 38


def test_splits_are_the_same_every_time_and_differ_with_the_seed(tmp_path: Path) -> None:
    first, again, other = (digits(tmp_path, split_seed=seed).fingerprint() for seed in (0, 0, 1))
    assert first == again
    assert first != other


def test_validation_is_mapped_by_name_when_it_lacks_a_class(tmp_path: Path) -> None:
    for name in COLOURS:
        fill(tmp_path / "train", name, 4)
    fill(tmp_path / "val", "red", 2)  # alone, it would be class 0 by position; by name it is class 2
    dataset = open_dataset(config(root=tmp_path), cache=tmp_path / "cache")
    assert dataset.labels == ("blue", "green", "red")
    assert dataset.val.labels.tolist() == [2, 2]


def test_class_that_training_lacks_is_named(tmp_path: Path) -> None:
    fill(tmp_path / "train", "red", 3)
    fill(tmp_path / "val", "green", 1)
    with pytest.raises(PipelineError, match="val/green is a class that train/ does not have"):
        open_dataset(config(root=tmp_path), cache=tmp_path / "cache")


def test_splits_that_are_not_given_are_cut_from_training(tmp_path: Path) -> None:
    for name in COLOURS:
        fill(tmp_path / "train", name, 10)
    dataset = open_dataset(config(root=tmp_path, validation=0.2, test=0.1), cache=tmp_path / "cache")
    assert [len(part) for part in (dataset.train, dataset.val, dataset.test)] == [21, 6, 3]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda root: None, "has no folder train/"),
        (lambda root: (root / "train" / "red").mkdir(parents=True), "train/red holds no image"),
        (lambda root: fill(root / "train", "red", 1), "validation and test need at least one more"),
    ],
)
def test_folder_that_cannot_be_used_is_refused(tmp_path: Path, make: object, message: str) -> None:
    assert callable(make)
    make(tmp_path)
    with pytest.raises(PipelineError, match=message):
        open_dataset(config(root=tmp_path), cache=tmp_path / "cache")


def test_missing_root_names_the_option() -> None:
    with pytest.raises(PipelineError, match=r"pass --data\.root DIR"):
        open_dataset(config(), cache=Path("unused"))


def test_fingerprint_changes_with_one_image_and_not_with_its_folder(tmp_path: Path) -> None:
    prints = []
    for folder in ("a", "b"):
        for name in COLOURS:
            fill(tmp_path / folder / "train", name, 4)
        prints.append(open_dataset(config(root=tmp_path / folder), cache=tmp_path / "cache").fingerprint())
    assert prints[0] == prints[1]
    Image.new("RGB", (8, 8), (9, 9, 9)).save(tmp_path / "a" / "train" / "red" / "0.png")
    changed = open_dataset(config(root=tmp_path / "a"), cache=tmp_path / "cache").fingerprint()
    assert changed != prints[0]
