"""A data set that is easy to tell apart: dark images and bright ones."""

from pathlib import Path

import numpy as np

from pipeline.data import Arrays, Split
from pipeline.loader import Images, open_images
from serving.worker.preprocess import Preprocessing

SIZE = 16  # pixels, of height and width


def stripes(count: int, *, cache: Path) -> Images:
    """Return `count` images of two classes in turn: 0 is dark, 1 is bright."""
    labels = np.arange(count) % 2
    noise = np.random.default_rng(0).integers(0, 60, (count, SIZE, SIZE))
    pixels = (noise + 150 * labels[:, None, None]).astype(np.uint8)
    split = Split(Arrays(pixels), np.arange(count), labels.astype(np.int64), "stripes")
    return open_images(split, Preprocessing(height=SIZE, width=SIZE, channels=1, resize=SIZE), cache=cache)
