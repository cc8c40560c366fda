"""supervisord: rendered, started as a daemon, and spoken to over its unix socket."""

import http.client
import shlex
import subprocess
import sys
import xmlrpc.client
from pathlib import Path
from typing import Any, NamedTuple

from serving import host
from serving.errors import StackError
from serving.rundir import Stack
from serving.topology import Topology
from serving.torchserve import render
from serving.unixhttp import UnixConnection

START_S = 60
# Faults of supervisord that say that the wanted state is reached.
ALREADY_STARTED, NOT_RUNNING = 60, 70


class Process(NamedTuple):
    """One program as supervisord sees it; `started_at` is seconds since the epoch, `pid` 0 when it is down."""

    name: str
    state: str
    pid: int
    started_at: float


def config(topology: Topology, *, haproxy: Path) -> str:
    """Return supervisord.conf. A percent sign in a path would be an expansion: doubled."""
    text = render(
        "supervisord.conf.j2",
        topology=topology,
        run_dir=shlex.quote(str(topology.run_dir)),
        python=shlex.quote(sys.executable),
        haproxy=shlex.quote(str(haproxy)),
        package_root=Path(__file__).parent.parent,
    )
    return text.replace("%", "%%")


def start(stack: Stack) -> None:
    """Start supervisord in the background; raises StackError with its message when it refuses."""
    run_dir = stack.topology.run_dir
    command = [sys.executable, "-m", "supervisor.supervisord", "-c", str(run_dir / "supervisord.conf")]
    try:
        result = subprocess.run(
            command,
            cwd=run_dir,
            env=host.clean_environment(run_dir),
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise StackError(f"supervisord did not start within {START_S} s; logs in {stack.topology.logs}") from error
    if result.returncode != 0:
        raise StackError(f"supervisord did not start: {(result.stderr or result.stdout).strip()}")


class _UnixTransport(xmlrpc.client.Transport):
    def __init__(self, path: Path, *, timeout_s: float) -> None:
        super().__init__()
        self._path = path
        self._timeout_s = timeout_s

    def make_connection(self, host: Any) -> http.client.HTTPConnection:
        """Ignore `host`: there is only the socket."""
        connection = UnixConnection(self._path, timeout_s=self._timeout_s)
        self._connection = host, connection  # what close() closes
        return connection


class Supervisor:
    """A connection to the supervisord of one stack; a call that is refused or not answered in time is a StackError."""

    def __init__(self, topology: Topology, *, timeout_s: float = 60) -> None:
        self._socket = topology.supervisor_socket
        self._timeout_s = timeout_s

    def _call(self, method: str, *arguments: object, reached: int | None = None) -> Any:
        transport = _UnixTransport(self._socket, timeout_s=self._timeout_s)
        with xmlrpc.client.ServerProxy("http://localhost", transport=transport) as proxy:
            try:
                return getattr(proxy.supervisor, method)(*arguments)
            except xmlrpc.client.Fault as fault:
                if fault.faultCode == reached:
                    return None
                said = " ".join([method, *map(str, arguments[:1])])
                raise StackError(f"supervisord refused {said}: {fault.faultString}") from fault
            except (OSError, http.client.HTTPException, xmlrpc.client.ProtocolError) as error:
                raise StackError(f"supervisord does not answer at {self._socket}: {error}") from error

    def alive(self) -> bool:
        """Tell whether supervisord answers."""
        try:
            return bool(self._call("getState")["statename"] == "RUNNING")
        except StackError:
            return False

    def processes(self) -> dict[str, Process]:
        """Return every program by name."""
        return {
            info["name"]: Process(info["name"], info["statename"], info["pid"], float(info["start"]))
            for info in self._call("getAllProcessInfo")
        }

    def start(self, name: str) -> None:
        """Start a program that is down; one that is already up stays as it is."""
        wait = False
        self._call("startProcess", name, wait, reached=ALREADY_STARTED)

    def stop(self, name: str, *, wait: bool = True) -> None:
        """Stop a program with its own signal and grace; one that is already down stays as it is."""
        self._call("stopProcess", name, wait, reached=NOT_RUNNING)

    def shutdown(self) -> None:
        """End supervisord and whatever still runs below it."""
        self._call("shutdown")
