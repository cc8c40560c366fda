"""Splits are fixed, stratified and disjoint; class names come from train/ and are mapped by name."""

import shutil
from functools import partial
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
    two_classes(tmp_path)
    fill(tmp_path / "val", "green", 1)
    with pytest.raises(PipelineError, match="val/green is a class that train/ does not have"):
        open_dataset(config(root=tmp_path), cache=tmp_path / "cache")


def test_splits_that_are_not_given_are_cut_from_training(tmp_path: Path) -> None:
    for name in COLOURS:
        fill(tmp_path / "train", name, 10)
    dataset = open_dataset(config(root=tmp_path, validation=0.2, test=0.1), cache=tmp_path / "cache")
    assert [len(part) for part in (dataset.train, dataset.val, dataset.test)] == [21, 6, 3]


def two_classes(root: Path, *, count: int = 4) -> None:
    for name in ("red", "blue"):
        fill(root / "train", name, count)


def broken_link(root: Path) -> None:
    two_classes(root)
    (root / "train" / "red" / "lost.png").symlink_to(root / "nowhere.png")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda root: None, "has no folder train/"),
        (lambda root: root.rmdir(), r"data\.root = '.*' is no folder; give the one that holds train/"),
        (lambda root: (root / "train").mkdir(), r"holds 0 class\(es\) \(no folder in train/\)"),
        (lambda root: fill(root / "train", "red", 4), r"holds 1 class\(es\) \(red\); a classifier needs two"),
        (lambda root: [(root / "train" / name).mkdir(parents=True) for name in "ab"], "train/a holds no image"),
        (partial(two_classes, count=1), "give three of each class"),
        (partial(two_classes, count=2), "give three of each class"),
        (broken_link, r"train/red/lost\.png is a link to nothing \(1 such\)"),
    ],
)
def test_folder_that_cannot_be_used_is_refused(tmp_path: Path, make: object, message: str) -> None:
    assert callable(make)
    make(tmp_path)
    with pytest.raises(PipelineError, match=message):
        open_dataset(config(root=tmp_path), cache=tmp_path / "cache")


def test_what_tools_leave_in_folders_is_no_class_and_no_image(tmp_path: Path) -> None:
    two_classes(tmp_path)
    shutil.copytree(tmp_path / "train" / "red", tmp_path / "train" / ".ipynb_checkpoints")
    shutil.copytree(tmp_path / "train" / "blue", tmp_path / "train" / "red" / ".thumbnails")
    (tmp_path / "train" / "red" / "._0.png").write_bytes(b"a Mac's resource fork")
    dataset = open_dataset(config(root=tmp_path), cache=tmp_path / "cache")
    assert dataset.labels == ("blue", "red")
    assert sum(len(part) for part in (dataset.train, dataset.val, dataset.test)) == 8


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
