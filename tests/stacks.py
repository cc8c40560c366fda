"""Stacks for tests: a free port, a run directory of their own, an archive whose handler obeys the request."""

import hashlib
import json
import os
import shutil
import socket
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import psutil

from serving import host, stack
from serving.archive import ArchiveInfo
from serving.rundir import Stack
from serving.stack import Options

# A body "sleep S" takes S seconds, "exit" ends the worker; anything else is answered with what arrived.
OBEDIENT = """
import json, os, time

def handle(data, context):
    if data is None:
        return None
    answers = []
    for index, row in enumerate(data):
        body = bytes(row.get("body") or b"")
        words = body.split(None, 2)
        if words[:1] == [b"exit"]:
            os._exit(3)
        if words[:1] == [b"sleep"]:
            time.sleep(float(words[1]))
        seen = {key.lower(): value for key, value in context.get_all_request_header(index).items() if key != "body"}
        answers.append(json.dumps({"length": len(body), "batch": len(data), "headers": seen}).encode())
    return answers
"""
BROKEN = """
raise ValueError("these weights are not mine")
"""


def stub_archive(folder: Path, *, code: str = OBEDIENT, name: str = "stub") -> ArchiveInfo:
    """Build an archive that holds nothing but the handler `code`."""
    path = folder / f"{name}.mar"
    manifest = {
        "createdOn": "01/01/2026 00:00:00",
        "runtime": "python",
        "model": {"modelName": name, "handler": "stub_handler.py", "modelVersion": "1.0"},
        "archiverVersion": "0.12.0",
    }
    with zipfile.ZipFile(path, "w") as opened:
        # A fixed time: an archive that is built twice is the same archive.
        opened.writestr(zipfile.ZipInfo("stub_handler.py"), code)
        opened.writestr(zipfile.ZipInfo("MAR-INF/MANIFEST.json"), json.dumps(manifest))
    return ArchiveInfo(path, name, "1.0", "0" * 64, hashlib.sha256(path.read_bytes()).hexdigest())


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def private_run_dir() -> Iterator[Path]:
    """Let stacks live in a short folder of their own; whatever is left of them at the end is killed."""
    folder = Path(tempfile.mkdtemp(prefix="qs-", dir="/tmp"))
    try:
        with patch.dict(os.environ, {"QUARTET_RUN_DIR": str(folder)}):
            yield folder
    finally:
        for run_dir in folder.glob("*/"):
            host.sweep(run_dir)
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def served(archive: ArchiveInfo, options: Options) -> Iterator[Stack]:
    """Serve `archive` on a free port for the length of the block."""
    with private_run_dir():
        started, _ = stack.start(archive, port=free_port(), options=options, say=lambda line: None)
        try:
            yield started
        finally:
            stack.stop(started.topology.port)


def jvm_of(running: Stack, index: int) -> psutil.Process:
    """Return the JVM of one replica."""
    found = [p for p in host.marked(running.topology.run_dir, replica=str(index)) if p.name() == "java"]
    assert len(found) == 1
    return found[0]
