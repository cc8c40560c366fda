"""Replicas killed, frozen and overloaded while clients keep asking: what clients see is typed, bounded, and passes."""

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

import httpx
import psutil
import pytest

from serving import host, rundir, stack
from serving.errors import StackError
from serving.rundir import Stack
from serving.stack import Options
from serving.status import status
from serving.topology import Limits, Timeouts, Watch
from tests.stacks import BROKEN, free_port, jvm_of, private_run_dir, served, stub_archive

pytestmark = pytest.mark.e2e

CLIENTS = 8
SMALL, LARGE = b"sleep 0.02 small", b"sleep 0.02 " + b"x" * 300_000  # the large one exceeds the balancer's buffer
OPTIONS = Options(
    replicas=2,
    workers=2,
    limits=Limits(batch_size=2, queued_requests=12, body_bytes=1_000_000),
    timeouts=Timeouts(response_s=4, balancer_s=8, queue_s=3, client_s=12),
    watch=Watch(interval_s=0.5, not_ready_s=5),
)


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with served(stub_archive(tmp_path_factory.mktemp("stub")), OPTIONS) as running:
        yield running


class Answer(NamedTuple):
    """What one request got: status, body and how long it took; status 0 is no answer."""

    status: int
    body: str
    seconds: float


def ask(running: Stack, body: bytes, *, client: httpx.Client | None = None) -> Answer:
    url = f"{running.topology.url}/predictions/stub"
    begin = time.monotonic()
    try:
        if client:
            response = client.post(url, content=body)
        else:
            response = httpx.post(url, content=body, trust_env=False, timeout=20)
    except httpx.HTTPError as error:
        return Answer(0, repr(error), time.monotonic() - begin)
    assert response.headers["content-type"] == "application/json"
    return Answer(response.status_code, response.text, time.monotonic() - begin)


@contextmanager
def load(running: Stack, body: bytes) -> Iterator[list[Answer]]:
    """Ask in a closed loop from CLIENTS connections for the length of the block."""
    stop, answers = threading.Event(), list[Answer]()

    def loop() -> None:
        with httpx.Client(trust_env=False, timeout=20) as client:
            while not stop.is_set():
                answers.append(ask(running, body, client=client))

    with ThreadPoolExecutor(CLIENTS) as pool:
        loops = [pool.submit(loop) for _ in range(CLIENTS)]
        try:
            yield answers
        finally:
            stop.set()
    for finished in loops:
        finished.result()


def wait_for(condition: Callable[[], bool], *, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.2)


def all_ready(running: Stack) -> bool:
    return status(running).state == "ready"


def failures(answers: list[Answer]) -> list[Answer]:
    return [answer for answer in answers if answer.status != 200]


def typed(answer: Answer) -> bool:
    return answer.status in (500, 502, 503, 504) and set(json.loads(answer.body)["error"]) == {"code", "message"}


def test_nothing_but_the_body_and_what_describes_it_is_passed_on(stub: Stack) -> None:
    headers = {"Cookie": "secret", "Authorization": "Bearer x", "X-Top-K": "9", "Content-Type": "image/png"}
    response = httpx.post(
        f"{stub.topology.url}/predictions/stub?top_k=3", content=b"hello", headers=headers, trust_env=False
    )
    passed = response.json()["headers"]
    assert passed.keys() - {"explain", "url_path"} == {"content-length", "content-type", "x-top-k"}
    assert (passed["content-type"], passed["x-top-k"]) == ("application/octet-stream", "3")


@pytest.mark.parametrize("body", [SMALL, LARGE], ids=["small", "large"])
def test_killed_jvm_costs_at_most_what_it_was_working_on_and_comes_back(stub: Stack, body: bytes) -> None:
    wait_for(lambda: all_ready(stub), seconds=60)
    replica = stub.topology.replicas[0]
    in_flight = stub.topology.server_maxconn(replica) + stub.topology.server_maxconn_large(replica)
    with load(stub, body) as answers:
        time.sleep(1)
        jvm = jvm_of(stub, 0)
        workers = jvm.children()
        assert len(workers) == 1
        jvm.kill()
        time.sleep(4)
    failed = failures(answers)
    assert len(answers) > 50
    assert len(failed) <= in_flight
    assert [answer for answer in failed if not typed(answer) or answer.seconds > 5] == []
    if body is SMALL:
        assert failed == []  # what fits the buffer is sent again
    wait_for(lambda: not any(worker.is_running() for worker in workers), seconds=10)  # no orphans
    wait_for(lambda: all_ready(stub), seconds=60)


@pytest.mark.parametrize("body", [SMALL, LARGE], ids=["small", "large"])
def test_frozen_jvm_is_replaced_and_holds_nobody_for_long(stub: Stack, body: bytes) -> None:
    wait_for(lambda: all_ready(stub), seconds=60)
    frozen = jvm_of(stub, 1)
    with load(stub, body) as answers:
        time.sleep(1)
        frozen.send_signal(signal.SIGSTOP)
        time.sleep(8)
    replica = stub.topology.replicas[1]
    assert len(failures(answers)) <= stub.topology.server_maxconn(replica) + stub.topology.server_maxconn_large(replica)
    assert [answer for answer in failures(answers) if not typed(answer)] == []
    assert max(answer.seconds for answer in answers) < 5
    wait_for(lambda: not frozen.is_running(), seconds=15)
    wait_for(lambda: all_ready(stub), seconds=60)


def test_worker_that_ends_costs_its_batch_a_typed_answer_and_comes_back(stub: Stack) -> None:
    wait_for(lambda: all_ready(stub), seconds=60)
    answer = ask(stub, b"exit")
    assert (answer.status, json.loads(answer.body)["error"]["code"]) == (503, "worker_lost")
    wait_for(lambda: ask(stub, SMALL).status == 200, seconds=10)  # the other replica, meanwhile
    wait_for(lambda: all_ready(stub), seconds=60)


def test_inference_over_its_time_gets_an_answer_at_about_the_limit(stub: Stack) -> None:
    wait_for(lambda: all_ready(stub), seconds=60)
    answer = ask(stub, b"sleep 30")
    assert typed(answer)
    assert answer.seconds < OPTIONS.timeouts.balancer_s
    wait_for(lambda: ask(stub, SMALL).status == 200, seconds=10)
    wait_for(lambda: all_ready(stub), seconds=60)


def test_full_queue_is_answered_at_once_and_leaves_no_backlog(stub: Stack) -> None:
    wait_for(lambda: all_ready(stub), seconds=60)
    with ThreadPoolExecutor(60) as pool:
        answers = list(pool.map(lambda _: ask(stub, b"sleep 0.5"), range(60)))
    assert {answer.status for answer in answers} == {200, 503}
    refused = failures(answers)
    assert {json.loads(answer.body)["error"]["code"] for answer in refused} <= {"overloaded", "unavailable"}
    assert sum(json.loads(answer.body)["error"]["code"] == "overloaded" for answer in refused) > 10
    assert max(answer.seconds for answer in refused) < OPTIONS.timeouts.queue_s + 2
    response = httpx.post(f"{stub.topology.url}/predictions/stub", content=SMALL, trust_env=False)
    assert (response.status_code, response.elapsed.total_seconds() < 2) == (200, True)


def test_refusal_says_when_to_come_back(stub: Stack) -> None:
    with ThreadPoolExecutor(60) as pool:
        url = f"{stub.topology.url}/predictions/stub"
        responses = list(
            pool.map(lambda _: httpx.post(url, content=b"sleep 0.3", trust_env=False, timeout=20), range(60))
        )
    assert {response.headers.get("retry-after") for response in responses if response.status_code == 503} == {"1"}


def test_balancer_that_dies_is_back_within_five_seconds(stub: Stack) -> None:
    wait_for(lambda: all_ready(stub), seconds=60)
    balancer = next(p for p in host.marked(stub.topology.run_dir) if p.name() == "haproxy")
    balancer.kill()
    psutil.wait_procs([balancer], timeout=5)
    wait_for(lambda: ask(stub, SMALL).status == 200, seconds=5)


def test_replica_that_keeps_dying_is_shown_as_failed_with_its_error(stub: Stack) -> None:
    def kill_until_failed() -> bool:
        for process in host.marked(stub.topology.run_dir, replica="0"):
            if process.name() == "java":
                process.kill()
        return status(stub).replicas[0].state == "failed"

    wait_for(kill_until_failed, seconds=60)
    shown = status(stub)
    assert "JVM ended" in shown.replicas[0].error
    assert shown.replicas[0].restarts == OPTIONS.watch.max_restarts + 1
    assert shown.state == "degraded"
    assert ask(stub, SMALL).status == 200


def test_handler_that_cannot_load_fails_the_start_with_its_own_error(tmp_path_factory: pytest.TempPathFactory) -> None:
    archive = stub_archive(tmp_path_factory.mktemp("broken"), code=BROKEN)
    port = free_port()
    with private_run_dir():
        with pytest.raises(StackError, match=r"replica-\d did not start: ValueError: these weights are not mine"):
            stack.start(archive, port=port, options=Options(replicas=1, workers=1), say=lambda line: None)
        assert host.marked(rundir.run_dir_of(port)) == []
        host.require_free_port(port)
