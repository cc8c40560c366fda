"""Starting and stopping a stack whose processes are stand-ins."""

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from serving import haproxy, host, rundir, stack
from serving.errors import StackError, UserError
from serving.stack import Options
from serving.supervisor import Process, Supervisor
from serving.topology import Topology
from tests.stacks import free_port, private_run_dir, stub_archive


@pytest.fixture
def base() -> Iterator[Path]:
    with private_run_dir() as folder:
        yield folder


def launchers(state: str, *, pid: int = 7) -> dict[str, Process]:
    return {name: Process(name, state, pid, 0.0) for name in ("replica-0", "replica-1")}


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
    assert not (base / str(port)).exists()  # nothing was started, so there is nothing to look at


def test_archive_for_a_gpu_starts_nothing_where_there_is_none(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack, "start_supervisor", nothing_started)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    archive = replace(stub_archive(tmp_path), provider="cuda")
    with pytest.raises(UserError, match="made for cuda, but no NVIDIA GPU is visible"):
        stack.start(archive, port=free_port(), options=Options(), say=print)
    assert list(base.glob("*/")) == []


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


@pytest.mark.parametrize("pids", [[0], [7, 8]])  # seen down, and started again between two looks
def test_launcher_that_crashes_ends_the_wait_with_the_last_line_of_its_traceback(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pids: list[int]
) -> None:
    def crash(started: rundir.Stack) -> None:
        started.topology.replicas[0].launcher_log.write_text(
            "Traceback (most recent call last):\n  File x\nImportError: no module of that name\n"
        )

    looks = iter(launchers("RUNNING" if pid else "BACKOFF", pid=pid) for pid in pids)
    monkeypatch.setattr(stack, "start_supervisor", crash)
    monkeypatch.setattr(Supervisor, "processes", lambda self: next(looks))
    with pytest.raises(StackError, match="replica-0 did not start: ImportError: no module of that name"):
        stack.start(stub_archive(tmp_path), port=free_port(), options=Options(), say=print)


@pytest.fixture
def already(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> rundir.Stack:
    """Return a stack of 2 replicas and 3 workers that seems to run."""
    monkeypatch.setattr(stack, "start_supervisor", lambda started: None)
    monkeypatch.setattr(stack, "wait_until_ready", lambda started, *, say: None)
    options = Options(replicas=2, workers=3)
    started, _ = stack.start(stub_archive(tmp_path), port=free_port(), options=options, say=lambda line: None)
    monkeypatch.setattr(Supervisor, "alive", lambda self: True)
    return started


@pytest.mark.parametrize("options", [Options(), Options(replicas=2), Options(replicas=2, workers=3)])
def test_running_stack_of_the_wanted_shape_is_left_as_it_is(
    already: rundir.Stack, tmp_path: Path, options: Options
) -> None:
    found, fresh = stack.start(stub_archive(tmp_path), port=already.topology.port, options=options, say=print)
    assert (found, fresh) == (already, False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Options(replicas=3), r"with 2 replicas, not 3; change it with: make stop serve PORT=\d+ REPLICAS=3"),
        (Options(workers=4), r"with 3 workers, not 4; stop it first: python -m serving stop --port \d+"),
    ],
)
def test_running_stack_of_another_shape_is_refused_with_the_remedy(
    already: rundir.Stack, tmp_path: Path, options: Options, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        stack.start(stub_archive(tmp_path), port=already.topology.port, options=options, say=print)


def test_stop_waits_for_a_start_and_then_ends_what_that_one_described(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, described = free_port(), threading.Event()
    ended: list[int] = []

    def end(topology: Topology, *, drain: bool) -> bool:
        ended.append(topology.port)
        return True

    monkeypatch.setattr(stack, "_end", end)
    monkeypatch.setattr(stack, "start_supervisor", lambda started: None)
    monkeypatch.setattr(stack, "wait_until_ready", lambda started, *, say: None)
    write = haproxy.write

    def write_late(*arguments: Any, **options: Any) -> None:
        described.set()
        time.sleep(0.3)  # stack.json is written after this: a stop that does not wait finds none
        write(*arguments, **options)

    monkeypatch.setattr(haproxy, "write", write_late)
    with ThreadPoolExecutor(1) as pool:
        started = pool.submit(stack.start, stub_archive(tmp_path), port=port, options=Options(), say=lambda line: None)
        assert described.wait(20)
        assert stack.stop(port)
        assert started.result()[1]
    assert ended == [port]


def test_start_that_takes_too_long_names_the_replicas_that_are_missing(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    up = haproxy.Server("replica-0", "UP", 0, 0)
    monkeypatch.setattr(stack, "start_supervisor", lambda started: started.topology.haproxy_socket.touch())
    monkeypatch.setattr(haproxy, "servers", lambda topology: {"replica-0": up})
    monkeypatch.setattr(Supervisor, "processes", lambda self: launchers("RUNNING"))
    timeouts = Options().timeouts.model_copy(update={"startup_s": 0})
    with pytest.raises(
        StackError,
        match=r"not ready within 0 s: replica-1: no error, only slow; a busy machine may need another try; logs in ",
    ):
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


@pytest.mark.parametrize("text", ["{}", "no json", '{"colour": "red"}'])
def test_processes_of_a_stack_that_another_version_described_are_stopped_too(base: Path, text: str) -> None:
    port = free_port()
    run_dir = rundir.run_dir_of(port)
    rundir.prepare(run_dir)
    (run_dir / "stack.json").write_text(text)
    orphan = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"], env=host.clean_environment(run_dir)
    )
    assert stack.stop(port) is True
    assert host.marked(run_dir) == []
    assert list(run_dir.iterdir()) == []
    orphan.wait()


def test_stop_ends_everything_though_supervisord_refuses(
    already: rundir.Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise StackError("supervisord refused stopProcess watchdog: SHUTDOWN_STATE")

    monkeypatch.setattr(Supervisor, "stop", refuse)
    orphan = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"], env=host.clean_environment(already.topology.run_dir)
    )
    assert stack.stop(already.topology.port)
    assert host.marked(already.topology.run_dir) == []
    orphan.wait()


@pytest.mark.parametrize("wrong", [{"replicas": 0}, {"workers": 0}, {"replica": 2}])
def test_impossible_shape_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValidationError):
        Options.model_validate(wrong)
