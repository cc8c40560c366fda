"""What `status` says about parts in every condition."""

from pathlib import Path

import pytest
from rich.console import Console

from serving import haproxy, rundir, torchserve
from serving.haproxy import Server
from serving.rundir import Model, Stack, WatchState
from serving.status import status, table
from serving.supervisor import Process, Supervisor
from serving.topology import plan


def stack_in(run_dir: Path, monkeypatch: pytest.MonkeyPatch, *, up: tuple[bool, bool], pids: tuple[int, int]) -> Stack:
    """Describe a stack of two whose parts answer as told."""
    topology = plan(run_dir=run_dir, port=8080, replicas=2, workers=2)
    for replica in topology.replicas:
        replica.directory.mkdir()
    processes = {r.name: Process(r.name, "RUNNING", pids[r.index], 0.0) for r in topology.replicas}
    servers = {r.name: Server(r.name, "UP" if up[r.index] else "DOWN", 10, 0) for r in topology.replicas}
    monkeypatch.setattr(Supervisor, "processes", lambda self: processes)
    monkeypatch.setattr(haproxy, "servers", lambda topology: servers)
    monkeypatch.setattr(
        torchserve,
        "describe",
        lambda replica, model, *, timeout_s: {"workers": [{"status": "READY"}]} if up[replica.index] else None,
    )
    model = Model(name="digits", version="1", digest="d" * 64, graph_digest="g" * 64, archive=run_dir / "digits.mar")
    return Stack(
        topology=topology, model=model, java=Path("java"), java_major=25, haproxy=Path("haproxy"), started_at=0.0
    )


@pytest.mark.parametrize(
    ("up", "word"), [((True, True), "ready"), ((True, False), "degraded"), ((False, False), "down")]
)
def test_stack_is_as_good_as_its_replicas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, up: tuple[bool, bool], word: str
) -> None:
    assert status(stack_in(tmp_path, monkeypatch, up=up, pids=(0, 0))).state == word


def test_replica_that_used_up_its_restarts_is_failed_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = stack_in(tmp_path, monkeypatch, up=(True, False), pids=(0, 0))
    folder = stack.topology.replicas[1].directory
    rundir.write(folder / "watch.json", WatchState(restarts=4, held=True))
    rundir.report(folder, "failed", error="OSError: disk full")
    shown = status(stack).replicas[1]
    assert (shown.state, shown.restarts, shown.error) == ("failed", 4, "OSError: disk full")


def test_loading_replica_is_starting_and_one_that_lost_its_workers_is_not_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = stack_in(tmp_path, monkeypatch, up=(False, False), pids=(999_999_999, 999_999_999))
    rundir.report(stack.topology.replicas[0].directory, "loading")
    rundir.report(stack.topology.replicas[1].directory, "ready")
    assert [replica.state for replica in status(stack).replicas] == ["starting", "not ready"]


def test_launcher_that_crashed_is_shown_with_the_last_line_of_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = stack_in(tmp_path, monkeypatch, up=(False, False), pids=(0, 0))
    first, second = stack.topology.replicas
    first.launcher_log.parent.mkdir()
    for replica in (first, second):
        replica.launcher_log.write_text("Traceback (most recent call last):\nKeyError: 'topology'\n")
    rundir.report(second.directory, "failed", error="ValueError: what it reported itself")
    shown = [replica.error for replica in status(stack).replicas]
    assert shown == ["KeyError: 'topology'", "ValueError: what it reported itself"]


def test_replica_without_a_process_is_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = status(stack_in(tmp_path, monkeypatch, up=(False, False), pids=(0, 0)))
    assert {replica.state for replica in shown.replicas} == {"down"}
    assert {replica.rss_mib for replica in shown.replicas} == {0}


def test_table_names_the_address_the_model_and_its_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(width=160, record=True, quiet=False, file=(tmp_path / "out").open("w"))
    with console.file:
        console.print(table(status(stack_in(tmp_path, monkeypatch, up=(True, True), pids=(0, 0)))))
    text = console.export_text()
    assert "http://127.0.0.1:8080 ready: digits 1 (gggggggggggg)" in text
    assert "replica-1" in text
