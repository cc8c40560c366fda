"""What the watchdog decides after a series of looks at one replica."""

import socket
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from serving.rundir import Model, Stack, WatchState
from serving.topology import Watch, plan
from serving.watchdog import Action, Observation, balancer_answers, decide

WATCH = Watch(not_ready_s=20, max_restarts=3, window_s=300)
STARTUP_S = 90.0


def look(now: float, *, pid: int = 7, ready: bool = False, was_ready: bool = True, **more: bool) -> Observation:
    return Observation(now=now, pid=pid, started_at=0.0, ready=ready, was_ready=was_ready, **more)


def follow(looks: Iterable[Observation], memory: WatchState | None = None) -> tuple[list[Action], WatchState]:
    memory = memory or WatchState()
    actions: list[Action] = []
    for seen in looks:
        action, memory = decide(seen, memory, watch=WATCH, startup_s=STARTUP_S)
        actions.append(action)
    return actions, memory


def test_ready_replica_is_left_alone() -> None:
    actions, memory = follow(look(float(now), ready=True) for now in range(100))
    assert set(actions) == {"none"}
    assert memory.restarts == 0


def test_replica_that_stops_being_ready_is_restarted_after_its_patience_and_not_before() -> None:
    actions, _ = follow([look(100, ready=True), look(119), look(120), look(121)])
    assert actions == ["none", "none", "none", "restart"]


def test_starting_replica_has_the_start_up_limit() -> None:
    actions, _ = follow([look(89, was_ready=False), look(109, was_ready=False), look(111, was_ready=False)])
    assert actions == ["none", "none", "restart"]


def test_replica_that_is_down_is_left_to_supervisord() -> None:
    assert follow([look(100, ready=True), look(200, pid=0)])[0] == ["none", "none"]


def test_first_start_is_no_restart_but_every_later_one_is() -> None:
    _, memory = follow([look(1, pid=1, was_ready=False), look(2, pid=1, ready=True), look(3, pid=2), look(4, pid=2)])
    assert memory.restarts == 1


def test_crash_loop_is_held_after_the_allowed_restarts() -> None:
    actions, memory = follow(look(float(n), pid=n, was_ready=False) for n in range(1, 6))
    assert actions == ["none", "none", "none", "none", "hold"]
    assert memory.held


def test_held_replica_is_tried_again_when_the_window_allows_it() -> None:
    _, memory = follow(look(float(n), pid=n, was_ready=False) for n in range(1, 6))
    actions, memory = follow([look(299.0, pid=0), look(303.0, pid=0), look(304, pid=9, ready=True)], memory)
    assert actions == ["none", "start", "none"]
    assert not memory.held


def test_replica_that_recovered_is_not_held_for_its_past() -> None:
    actions, _ = follow(look(float(n), pid=n, ready=True) for n in range(1, 9))
    assert set(actions) == {"none"}


def test_restarts_long_ago_do_not_count() -> None:
    actions, memory = follow(look(n * 200.0, pid=n, ready=False, was_ready=False) for n in range(1, 9))
    assert "hold" not in actions
    assert memory.restarts == 7


def test_replica_that_supervisord_gave_up_is_shown_as_failed_and_tried_again_later() -> None:
    actions, _ = follow([look(10, pid=0, given_up=True), look(100, pid=0, given_up=True), look(311, pid=0)])
    assert actions == ["hold", "none", "start"]


@pytest.mark.parametrize("field", ["interval_s", "not_ready_s", "max_restarts", "window_s"])
def test_watch_without_a_bound_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        Watch.model_validate({field: 0})


def test_balancer_that_accepts_but_never_answers_is_told_from_one_that_does(tmp_path: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = silent.getsockname()[1]
        stack = Stack(
            topology=plan(run_dir=tmp_path, port=port, replicas=1, workers=1),
            model=Model(name="digits", version="1", digest="d", graph_digest="g", archive=tmp_path / "digits.mar"),
            java=Path("java"),
            java_major=25,
            haproxy=Path("haproxy"),
            started_at=0.0,
        )
        assert not balancer_answers(stack)

        def answer() -> None:
            with silent.accept()[0] as stale, silent.accept()[0] as connection:
                stale.close()
                connection.recv(1000)
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")

        with ThreadPoolExecutor(1) as pool:
            answered = pool.submit(answer)
            assert balancer_answers(stack)
            answered.result()
