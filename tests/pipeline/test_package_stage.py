"""Which images travel in the archive."""

import numpy as np

from pipeline.data import Arrays, Split
from pipeline.package_stage import spread_over_classes

LABELS = np.array([0, 0, 0, 1, 1, 2])
SPLIT = Split(Arrays(np.zeros((6, 2, 2), np.uint8)), np.arange(6), LABELS, "six")


def test_golden_images_come_from_every_class_before_any_comes_twice() -> None:
    assert LABELS[spread_over_classes(SPLIT, 3)].tolist() == [0, 1, 2]
    assert LABELS[spread_over_classes(SPLIT, 5)].tolist() == [0, 1, 2, 0, 1]


def test_fewer_images_than_asked_for_are_all_taken() -> None:
    assert len(spread_over_classes(SPLIT, 99)) == 6
