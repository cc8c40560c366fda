"""A process group of one."""

import os
import socket
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from pipeline.training.group import Group


@pytest.fixture(scope="module")
def group() -> Iterator[Group]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    yield Group(0, 1, torch.device("cpu"))
    dist.destroy_process_group()
