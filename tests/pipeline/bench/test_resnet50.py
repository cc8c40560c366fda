"""The table says what each graph gains over the dense one, for its MACs and in time."""

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pipeline.bench.resnet50 import markdown, photos, row
from pipeline.measure import Cost

MACS = {"fp32": 4_000_000_000, "pruned": 1_000_000_000}
COSTS = {"fp32": Cost(np.full(5, 96.0), 100.0), "pruned": Cost(np.full(5, 25.0), 30.0)}


def test_gain_is_over_dense_and_per_mac_saved() -> None:
    pruned = row("pruned", COSTS, MACS, size_bytes=28_000_000)
    assert pruned.gain.median == pytest.approx(3.84)
    assert pruned.per_mac == pytest.approx(0.96)
    assert row("fp32", COSTS, MACS, size_bytes=1).per_mac == 1


def test_table_has_the_figures_and_the_conditions() -> None:
    lines = markdown([row("pruned", COSTS, MACS, size_bytes=28_000_000)], rounds=5, source="40 photos").splitlines()
    assert lines[2] == "| pruned | 1.00 G | 28.0 | 25.0 ± 0.0 | 3.84x (3.84-3.84) | 0.96 |"
    for part in ("40 photos", "n = 5 interleaved rounds", "one thread", "onnxruntime 1.", "pipeline.bench.resnet50"):
        assert part in lines[-1]


def test_photos_are_decoded_as_the_worker_does(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (512, 256), (200, 10, 10)).save(buffer, format="PNG")
    with tarfile.open(tmp_path / "photos.tar", "w") as tar:
        entry = tarfile.TarInfo("red.png")
        entry.size = len(buffer.getvalue())
        buffer.seek(0)
        tar.addfile(entry, buffer)
    images = photos(tmp_path / "photos.tar")
    assert images.shape == (1, 224, 224, 3)
    assert images[0, 100, 100].tolist() == [200, 10, 10]
