"""A process group of one, and a split that is easy to tell apart."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from pipeline.compression.recover import Splits
from pipeline.data import Arrays, Split
from pipeline.loader import open_images
from pipeline.training.group import Group
from serving.worker.preprocess import Preprocessing

SIZE = 16


@pytest.fixture(scope="module")
def group() -> Iterator[Group]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    yield Group(0, 1, torch.device("cpu"))
    dist.destroy_process_group()


@pytest.fixture
def splits(tmp_path: Path) -> Splits:
    """20 images of two classes: dark and bright."""
    labels = np.arange(20) % 2
    noise = np.random.default_rng(0).integers(0, 60, (20, SIZE, SIZE))
    pixels = (noise + 150 * labels[:, None, None]).astype(np.uint8)
    split = Split(Arrays(pixels), np.arange(20), labels.astype(np.int64), "stripes")
    images = open_images(split, Preprocessing(height=SIZE, width=SIZE, channels=1, resize=SIZE), cache=tmp_path)
    return Splits(images, images)
