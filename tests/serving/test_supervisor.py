"""supervisord's rendered configuration, and its refusals."""

import configparser
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socketserver import UnixStreamServer
from xmlrpc.client import Fault
from xmlrpc.server import SimpleXMLRPCDispatcher, SimpleXMLRPCRequestHandler

import pytest

from serving import supervisor
from serving.errors import StackError
from serving.rundir import Model, Stack
from serving.supervisor import Supervisor
from serving.topology import Topology, plan


def topology(run_dir: Path) -> Topology:
    return plan(run_dir=run_dir, port=8080, replicas=2, workers=2)


def rendered(run_dir: Path) -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser(inline_comment_prefixes=(" ;",))
    parser.read_string(supervisor.config(topology(run_dir), haproxy=Path("/usr/sbin/haproxy")))
    return parser


def test_programs_are_the_replicas_the_balancer_and_the_watchdog(tmp_path: Path) -> None:
    programs = [name.removeprefix("program:") for name in rendered(tmp_path).sections() if name.startswith("program:")]
    assert programs == ["replica-0", "replica-1", "haproxy", "watchdog"]


def test_everything_restarts_and_every_log_is_bounded(tmp_path: Path) -> None:
    parser = rendered(tmp_path)
    for name in parser.sections():
        if name.startswith("program:"):
            assert parser[name]["autorestart"] == "true"
            assert parser[name]["stdout_logfile_maxbytes"].endswith("MB")


def test_balancer_is_stopped_softly_and_given_the_time_to_drain(tmp_path: Path) -> None:
    balancer = rendered(tmp_path)["program:haproxy"]
    assert balancer["stopsignal"] == "USR1"
    assert int(balancer["stopwaitsecs"]) > topology(tmp_path).timeouts.drain_s


def test_supervisord_is_reached_through_a_private_socket_only(tmp_path: Path) -> None:
    parser = rendered(tmp_path)
    assert parser["unix_http_server"]["chmod"] == "0600"
    assert "inet_http_server" not in parser


def test_spaces_and_percent_signs_in_paths_survive(tmp_path: Path) -> None:
    folder = tmp_path / "50% off"
    command = rendered(folder)["program:haproxy"]["command"]
    assert command == f"/usr/sbin/haproxy -db -f '{tmp_path}/50%% off'/haproxy.cfg"


def test_supervisord_that_is_gone_is_not_alive_and_says_where_it_was_sought(tmp_path: Path) -> None:
    gone = Supervisor(topology(tmp_path), timeout_s=1)
    assert not gone.alive()
    with pytest.raises(StackError, match=r"supervisord does not answer at .*supervisor\.sock"):
        gone.processes()


class _Handler(SimpleXMLRPCRequestHandler):
    rpc_paths = ()
    disable_nagle_algorithm = False  # there is none on a unix socket


class _Server(UnixStreamServer, SimpleXMLRPCDispatcher):
    logRequests = False

    def __init__(self, path: Path) -> None:
        SimpleXMLRPCDispatcher.__init__(self, allow_none=True)
        UnixStreamServer.__init__(self, str(path), _Handler)


@contextmanager
def refusing(path: Path, code: int) -> Iterator[None]:
    """Answer every call with the fault `code`."""

    def refuse(*_: object) -> None:
        raise Fault(code, "NOT_TODAY")

    with _Server(path) as server:
        for name in ("getState", "getAllProcessInfo", "startProcess", "stopProcess", "shutdown"):
            server.register_function(refuse, f"supervisor.{name}")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


def test_supervisord_that_refuses_because_it_ends_is_an_error_of_one_line(tmp_path: Path) -> None:
    asked = Supervisor(topology(tmp_path), timeout_s=5)
    with refusing(topology(tmp_path).supervisor_socket, 6):  # SHUTDOWN_STATE
        assert not asked.alive()
        with pytest.raises(StackError, match="supervisord refused getAllProcessInfo: NOT_TODAY"):
            asked.processes()
        with pytest.raises(StackError, match="supervisord refused shutdown: NOT_TODAY"):
            asked.shutdown()
        with pytest.raises(StackError, match="supervisord refused stopProcess replica-0: NOT_TODAY"):
            asked.stop("replica-0")


def test_program_that_is_already_as_wanted_is_no_error_and_the_opposite_is_one(tmp_path: Path) -> None:
    asked = Supervisor(topology(tmp_path), timeout_s=5)
    with refusing(topology(tmp_path).supervisor_socket, supervisor.ALREADY_STARTED):
        asked.start("replica-0")
        with pytest.raises(StackError, match="refused stopProcess"):
            asked.stop("replica-0")
    topology(tmp_path).supervisor_socket.unlink()
    with refusing(topology(tmp_path).supervisor_socket, supervisor.NOT_RUNNING):
        asked.stop("replica-0")
        with pytest.raises(StackError, match="refused startProcess"):
            asked.start("replica-0")


def test_supervisord_that_does_not_come_up_in_time_is_an_error_of_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang(command: list[str], **options: float) -> None:
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(subprocess, "run", hang)
    model = Model(name="digits", version="1", digest="d", graph_digest="g", archive=tmp_path / "digits.mar")
    described = Stack(
        topology=topology(tmp_path),
        model=model,
        java=Path("java"),
        java_major=25,
        haproxy=Path("haproxy"),
        started_at=0.0,
    )
    with pytest.raises(StackError, match="supervisord did not start within 60 s"):
        supervisor.start(described)
