"""The launcher of one replica: what it prepares, and what it reports when the JVM ends."""

import subprocess
import sys
from pathlib import Path

import pytest

from serving import replica, rundir, torchserve
from serving.errors import StackError
from serving.rundir import Model, ReplicaState, Stack
from serving.topology import plan


@pytest.fixture
def stack(tmp_path: Path) -> Stack:
    archive = tmp_path / "archives" / "digits.mar"
    archive.parent.mkdir()
    archive.write_bytes(b"archive")
    topology = plan(run_dir=tmp_path, port=8080, replicas=1, workers=1)
    for folder in (topology.logs, topology.replicas[0].directory):
        folder.mkdir()
    return Stack(
        topology=topology,
        model=Model(name="digits", version="1", digest="d", graph_digest="g", archive=archive),
        java=Path("/bin/false"),
        java_major=25,
        haproxy=Path("haproxy"),
        started_at=0.0,
    )


def test_every_start_begins_with_fresh_temporary_files_and_the_archive(stack: Stack) -> None:
    first = stack.topology.replicas[0]
    replica.prepare(stack, first)
    (first.temp / "unpacked").touch()
    (first.store / "foreign.mar").touch()
    replica.prepare(stack, first)
    assert list(first.temp.iterdir()) == []
    assert [path.name for path in first.store.iterdir()] == ["digits.mar"]
    assert (first.store / "digits.mar").read_bytes() == b"archive"


@pytest.mark.parametrize(
    ("gpus", "index", "seen"), [((), 0, "unset"), (("4", "7"), 0, "4"), (("4", "7"), 1, "7"), (("4", "7"), 2, "4")]
)
def test_replicas_take_the_gpus_in_turn(
    tmp_path: Path, stack: Stack, monkeypatch: pytest.MonkeyPatch, gpus: tuple[str, ...], index: int, seen: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    command = ["/bin/sh", "-c", "echo ${CUDA_VISIBLE_DEVICES-unset} > seen"]
    monkeypatch.setattr(torchserve, "java_command", lambda *_, **__: command)
    topology = plan(run_dir=tmp_path, port=8080, replicas=3, workers=3)
    one = topology.replicas[index]
    one.directory.mkdir(exist_ok=True)
    chosen = stack.model_copy(update={"topology": topology, "model": stack.model.model_copy(update={"gpus": gpus})})
    assert replica.start_jvm(chosen, one).wait() == 0
    assert (one.directory / "seen").read_text() == f"{seen}\n"


def test_logs_of_the_run_before_are_kept_apart(stack: Stack) -> None:
    first = stack.topology.replicas[0]
    first.logs.mkdir()
    (first.logs / "model.log").write_text("INFO ValueError: of the run before\n")
    replica.prepare(stack, first)
    assert torchserve.last_error(first) == ""
    assert (first.logs / "model.previous").exists()


def test_jvm_that_ends_is_reported_with_its_status(stack: Stack) -> None:
    assert replica.launch(stack, 0) == 1
    state = rundir.read(stack.topology.replicas[0].directory / "state.json", ReplicaState)
    assert state is not None
    assert (state.phase, state.error) == ("failed", "the JVM ended with status 1: ")


def test_replica_is_ready_only_after_the_registration(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    first = stack.topology.replicas[0]
    phases: list[str] = []

    def note(*_: object, **__: object) -> None:
        state = rundir.read(first.directory / "state.json", ReplicaState)
        phases.append(state.phase if state else "none")

    monkeypatch.setattr(torchserve, "wait_for_management", note)
    monkeypatch.setattr(torchserve, "register", note)
    with subprocess.Popen([sys.executable, "-c", ""]) as jvm:
        assert replica.serve(stack, first, jvm) == "the JVM ended with status 0"
    note()
    assert phases == ["none", "loading", "ready"]


def test_registration_that_fails_gives_its_error(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise StackError("ValueError: wrong digest")

    monkeypatch.setattr(torchserve, "wait_for_management", lambda *_, **__: None)
    monkeypatch.setattr(torchserve, "register", refuse)
    with subprocess.Popen([sys.executable, "-c", ""]) as jvm:
        assert replica.serve(stack, stack.topology.replicas[0], jvm) == "ValueError: wrong digest"
