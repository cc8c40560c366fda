"""Sampling, augmentation and sharding are functions of (seed, epoch, image): DD-02, DD-03 and exact evaluation."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pipeline.data import Files, Split
from pipeline.errors import PipelineError
from pipeline.loader import (
    Images,
    Sampling,
    augment,
    batch_positions,
    open_images,
    shard,
    steps_per_epoch,
    training_batches,
)
from serving.worker.preprocess import Preprocessing

SPEC = Preprocessing(height=8, width=8, channels=3, resize=8)


def epoch_order(epoch: int, *, seed: int = 0) -> list[int]:
    parts = [batch_positions(100, 10, seed=seed, epoch=epoch, step=step) for step in range(10)]
    return [int(p) for p in np.concatenate(parts)]


def split_of(folder: Path, count: int) -> Split:
    for number in range(count):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(folder / f"{number}.png")
    names = tuple(f"{number}.png" for number in range(count))
    return Split(Files(folder, names, folder), np.arange(count), np.arange(count) % 3, f"digest-{count}")


def images_of(folder: Path, count: int) -> Images:
    return open_images(split_of(folder, count), SPEC, cache=folder / "cache")


def test_every_epoch_has_an_order_of_its_own_that_the_seed_reproduces() -> None:
    assert epoch_order(0) == epoch_order(0)
    assert epoch_order(0) != epoch_order(1)
    assert epoch_order(0) != epoch_order(0, seed=1)
    assert sorted(epoch_order(1)) == list(range(100))


@pytest.mark.parametrize(("count", "world_size"), [(10, 4), (3, 4), (1, 2), (7, 3)])
def test_shards_are_disjoint_and_cover_without_padding(count: int, world_size: int) -> None:
    parts = [shard(np.arange(count), rank=rank, world_size=world_size).tolist() for rank in range(world_size)]
    assert sorted(position for part in parts for position in part) == list(range(count))


def test_short_last_batch_is_left_out_unless_it_is_the_only_one() -> None:
    assert steps_per_epoch(130, 64) == 2
    assert steps_per_epoch(10, 64) == 1


def test_ranks_together_see_what_one_process_would(tmp_path: Path) -> None:
    images = images_of(tmp_path, 12)
    sampling = Sampling(batch_size=4, seed=0, augment=("flip", "crop"), padding=2)
    alone = list(training_batches(images, sampling, first_step=0, last_step=6, rank=0, world_size=1))
    ranks = [list(training_batches(images, sampling, first_step=0, last_step=6, rank=r, world_size=2)) for r in (0, 1)]
    for step, whole in enumerate(alone):
        for rank in (0, 1):
            part = ranks[rank][step]
            assert part.positions.tolist() == whole.positions[rank::2].tolist()
            assert (part.images_BHWC == whole.images_BHWC[rank::2]).all()


def test_resuming_at_a_step_gives_the_batches_of_an_uninterrupted_run(tmp_path: Path) -> None:
    images = images_of(tmp_path, 12)
    sampling = Sampling(batch_size=4, seed=3, augment=("crop",), padding=1)
    whole = list(training_batches(images, sampling, first_step=0, last_step=6, rank=0, world_size=1))
    rest = list(training_batches(images, sampling, first_step=4, last_step=6, rank=0, world_size=1))
    assert [batch.step for batch in rest] == [4, 5]
    assert all((a.images_BHWC == b.images_BHWC).all() for a, b in zip(whole[4:], rest, strict=True))


def test_flip_mirrors_left_and_right() -> None:
    image = np.arange(4, dtype=np.uint8).reshape(1, 1, 4, 1)
    draws = np.array([[1, 0, 0]])
    assert augment(image, draws, kinds=("flip",), padding=1)[0, 0, :, 0].tolist() == [3, 2, 1, 0]


def test_crop_shifts_the_image_over_black() -> None:
    image = np.full((1, 2, 2, 1), 9, np.uint8)
    draws = np.array([[0, 2, 1]])  # two rows down from one above: the picture moves up by one
    assert augment(image, draws, kinds=("crop",), padding=1)[0, :, :, 0].tolist() == [[9, 9], [0, 0]]


def test_draw_that_says_no_flip_leaves_the_image() -> None:
    image = np.arange(4, dtype=np.uint8).reshape(1, 1, 4, 1)
    assert (augment(image, np.array([[0, 0, 0]]), kinds=("flip",), padding=1) == image).all()


def test_decoded_pixels_are_kept_and_read_back(tmp_path: Path) -> None:
    split = split_of(tmp_path, 3)
    first = open_images(split, SPEC, cache=tmp_path / "cache").batch(np.array([2, 0]))
    (tmp_path / "0.png").unlink()
    again = open_images(split, SPEC, cache=tmp_path / "cache").batch(np.array([2, 0]))
    assert first[:, 0, 0, 0].tolist() == [2, 0]
    assert (first == again).all()


def test_split_too_large_for_the_cache_is_decoded_anew(tmp_path: Path) -> None:
    images = Images(split_of(tmp_path, 3), SPEC, None)
    assert images.batch(np.array([2, 1]))[:, 0, 0, 0].tolist() == [2, 1]


def test_undecodable_files_are_counted_and_named(tmp_path: Path) -> None:
    split = split_of(tmp_path, 4)
    for name in ("1.png", "3.png"):
        (tmp_path / name).write_bytes(b"no picture")
    with pytest.raises(PipelineError, match=r"2 image\(s\) cannot be decoded, remove them: 1\.png .*3\.png"):
        open_images(split, SPEC, cache=tmp_path / "cache")
