"""What pruning and recovery learn from."""

from pathlib import Path

import pytest

from pipeline.compression.recover import Splits
from tests.pipeline.stripes import stripes


@pytest.fixture
def splits(tmp_path: Path) -> Splits:
    images = stripes(20, cache=tmp_path)
    return Splits(images, images)
