import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError

from serving import haproxy, host, rundir, stack
from serving.errors import StackError, UserError
from serving.stack import Options
from tests.stacks import free_port, private_run_dir, stub_archive


@pytest.fixture
def base() -> Iterator[Path]:
    with private_run_dir() as folder:
        yield folder


def nothing_started(*_: object, **__: object) -> None:
    raise AssertionError("it must not come to this")


def test_port_in_use_is_found_before_anything_starts(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack, "start_supervisor", nothing_started)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} is in use"):
            stack.start(stub_archive(tmp_path), port=port, options=Options(), say=print)


def test_archive_that_changes_while_it_is_read_is_refused(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack, "start_supervisor", nothing_started)
    archive = stub_archive(tmp_path)
    archive.path.write_bytes(b"something else")
    with pytest.raises(UserError, match=r"stub\.mar changed while it was read"):
        stack.start(archive, port=free_port(), options=Options(), say=print)


def test_start_that_fails_leaves_nothing_behind(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port, orphans = free_port(), []

    def start_something(started: rundir.Stack) -> None:
        environment = host.clean_environment(started.topology.run_dir)
        orphans.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=environment))
        raise StackError("supervisord did not start")

    monkeypatch.setattr(stack, "start_supervisor", start_something)
    with pytest.raises(StackError, match="supervisord did not start"):
        stack.start(stub_archive(tmp_path), port=port, options=Options(), say=print)
    assert host.marked(rundir.run_dir_of(port)) == []
    assert [path.name for path in rundir.run_dir_of(port).iterdir()] == ["logs"]
    orphans[0].wait()


def test_more_replicas_than_cpus_is_one_warning(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack, "start_supervisor", lambda started: None)
    monkeypatch.setattr(stack, "wait_until_ready", lambda started, *, say: None)
    monkeypatch.setattr(host, "available_cpus", lambda: 1)
    said: list[str] = []
    started, fresh = stack.start(stub_archive(tmp_path), port=free_port(), options=Options(replicas=3), say=said.append)
    assert fresh
    assert said == ["warning: 3 replicas share 1 CPUs; they add availability, not speed"]
    assert started.topology.workers == 3


def test_replica_that_fails_while_loading_ends_the_wait_with_its_error(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(started: rundir.Stack) -> None:
        rundir.report(started.topology.replicas[1].directory, "failed", error="ValueError: wrong digest")

    monkeypatch.setattr(stack, "start_supervisor", fail)
    with pytest.raises(StackError, match="replica-1 did not start: ValueError: wrong digest"):
        stack.start(stub_archive(tmp_path), port=free_port(), options=Options(), say=print)


def test_start_that_takes_too_long_names_the_replicas_that_are_missing(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    up = haproxy.Server("replica-0", "UP", 0, 0, 0, 0, "L7OK")
    monkeypatch.setattr(stack, "start_supervisor", lambda started: started.topology.haproxy_socket.touch())
    monkeypatch.setattr(haproxy, "servers", lambda topology: {"replica-0": up})
    timeouts = Options().timeouts.model_copy(update={"startup_s": 0})
    with pytest.raises(StackError, match=r"not ready within 0 s: replica-1: no error; logs in "):
        stack.start(stub_archive(tmp_path), port=free_port(), options=Options(timeouts=timeouts), say=print)


def test_stopping_what_never_ran_is_no_error(base: Path) -> None:
    assert stack.stop(free_port()) is False


def test_processes_of_a_stack_whose_description_is_lost_are_stopped_too(base: Path) -> None:
    port = free_port()
    run_dir = rundir.run_dir_of(port)
    orphan = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"], env=host.clean_environment(run_dir)
    )
    assert stack.stop(port) is True
    assert host.marked(run_dir) == []
    orphan.wait()


@pytest.mark.parametrize("wrong", [{"replicas": 0}, {"workers": 0}, {"replica": 2}])
def test_impossible_shape_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValidationError):
        Options.model_validate(wrong)
