"""The typed client against endpoints that answer well, badly, or not at all."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from serving.client import AsyncClient, Budget, Candidate, Client, Prediction, RequestFailed, Retry
from tests.stacks import free_port

NEVER = Retry(attempts=1)
QUICK = Retry(first_wait_s=0.001)
GOOD = {
    "predictions": [{"label": "seven", "index": 7, "probability": 0.9}],
    "model": "digits",
    "version": "1",
    "digest": "d",
}


@contextmanager
def endpoint(
    status: int, body: bytes, headers: dict[str, str] | None = None, *, first: Sequence[int] = ()
) -> Iterator[tuple[str, list[str]]]:
    """Answer every POST the same way, but the `first` ones with other statuses (0: hang up).

    Yields the address and the list of what was asked.
    """
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(f"{self.path} {self.rfile.read(int(self.headers['content-length'])).decode()}")
            now = first[len(asked) - 1] if len(asked) <= len(first) else status
            if not now:
                self.close_connection = True
                return
            self.send_response(now)
            for name, value in {"content-length": str(len(body)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()


def test_answer_is_typed() -> None:
    with endpoint(200, json.dumps(GOOD).encode()) as (url, asked), Client(url, model="digits") as client:
        answer = client.predict(b"image")
    assert answer.predictions == (Candidate(label="seven", index=7, probability=0.9),)
    assert (answer.model, answer.version, answer.digest) == ("digits", "1", "d")
    assert asked == ["/predictions/digits image"]


def test_path_is_read_and_top_k_travels_in_the_query(tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(b"pixels")
    with endpoint(200, json.dumps(GOOD).encode()) as (url, asked), Client(url, model="digits") as client:
        client.predict(tmp_path / "x.png", top_k=3)
    assert asked == ["/predictions/digits?top_k=3 pixels"]


def test_error_carries_the_status_the_message_and_when_to_come_back() -> None:
    body = b'{"error":{"code":"overloaded","message":"no room"}}'
    with (
        endpoint(503, body, {"retry-after": "2"}) as (url, asked),
        Client(url, model="digits", timeout_s=1.5) as client,
        pytest.raises(RequestFailed, match="503: no room") as caught,
    ):
        client.predict(b"image")
    assert (caught.value.http_status, caught.value.retry_after_s) == (503, 2.0)
    assert len(asked) == 1  # two seconds are more than are left


def test_error_that_is_no_json_gives_its_reason() -> None:
    with (
        endpoint(502, b"<html>") as (url, _),
        Client(url, model="digits", retry=NEVER) as client,
        pytest.raises(RequestFailed, match="502: Bad Gateway"),
    ):
        client.predict(b"image")


def test_nobody_listening_is_one_line() -> None:
    with (
        Client(f"http://127.0.0.1:{free_port()}", model="digits", retry=QUICK) as client,
        pytest.raises(RequestFailed, match=r"no answer from http://127\.0\.0\.1:") as caught,
    ):
        client.predict(b"image")
    assert caught.value.http_status == 0


def test_answer_of_another_shape_is_refused() -> None:
    with (
        endpoint(200, b'{"label": 7}') as (url, _),
        Client(url, model="digits") as client,
        pytest.raises(RequestFailed, match="unexpected answer"),
    ):
        client.predict(b"image")


@pytest.mark.parametrize("body", [b"<html>another program</html>", b"", b"\xff\xfe\xff"])
def test_answer_of_another_program_is_one_line(body: bytes) -> None:
    with (
        endpoint(200, body) as (url, _),
        Client(url, model="digits") as client,
        pytest.raises(RequestFailed, match=r"the answer of http://127\.0\.0\.1:\d+ is no JSON") as caught,
    ):
        client.post(b"image")
    assert caught.value.http_status == 200


def test_date_to_come_back_at_is_left_out() -> None:
    with (
        endpoint(503, b"", {"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}) as (url, _),
        Client(url, model="digits", retry=QUICK) as client,
        pytest.raises(RequestFailed, match="503") as caught,
    ):
        client.post(b"image")
    assert caught.value.retry_after_s is None


def predict(url: str, *, later: bool, **options: Any) -> Prediction:
    """Ask for one image, with either client."""
    if not later:
        with Client(url, model="digits", **options) as client:
            return client.predict(b"image")

    async def ask() -> Prediction:
        async with AsyncClient(url, model="digits", **options) as client:
            return await client.predict(b"image")

    return asyncio.run(ask())


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("first", [(503,), (502, 429), (0,), (0, 503)])
def test_what_passes_is_tried_again(first: tuple[int, ...], later: bool) -> None:
    with endpoint(200, json.dumps(GOOD).encode(), first=first) as (url, asked):
        answer = predict(url, later=later, retry=QUICK)
    assert answer.predictions[0].label == "seven"
    assert asked == ["/predictions/digits image"] * (len(first) + 1)


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("status", [400, 413, 415, 500, 504])
def test_what_would_only_fail_again_is_not(status: int, later: bool) -> None:
    with endpoint(status, b"{}") as (url, asked), pytest.raises(RequestFailed, match=str(status)):
        predict(url, later=later, retry=QUICK)
    assert len(asked) == 1


@pytest.mark.parametrize("later", [False, True])
def test_attempts_are_counted(later: bool) -> None:
    with endpoint(503, b"{}") as (url, asked), pytest.raises(RequestFailed, match="503"):
        predict(url, later=later, retry=Retry(attempts=4, first_wait_s=0.001))
    assert len(asked) == 4


@pytest.mark.parametrize("later", [False, True])
def test_answer_that_is_late_is_not_asked_for_again(later: bool) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(RequestFailed, match="no answer") as caught:
            predict(url, later=later, retry=QUICK, timeout_s=0.2)
        silent.setblocking(False)
        silent.accept()[0].close()
        with pytest.raises(BlockingIOError):  # nobody came a second time
            silent.accept()
    assert caught.value.timed_out


def test_wait_is_what_the_endpoint_asks_for_or_none_when_that_is_too_long() -> None:
    busy = RequestFailed("503", http_status=503, retry_after_s=2)
    retry = Retry(longest_wait_s=3)
    assert retry.wait_s(busy, attempt=1, left_s=60) == 2
    assert retry.wait_s(busy, attempt=1, left_s=1) is None
    assert Retry(longest_wait_s=1).wait_s(busy, attempt=1, left_s=60) is None
    waits = [retry.wait_s(RequestFailed("", http_status=503), attempt=2, left_s=60) for _ in range(50)]
    assert all(wait is not None and 0.1 <= wait <= 0.2 for wait in waits)
    assert len(set(waits)) > 40  # clients that failed together do not come back together


def test_lasting_fault_is_not_multiplied() -> None:
    """Of 200 calls that fail, 10 and a tenth of the rest are sent again, and not 400."""
    with endpoint(503, b"{}") as (url, asked), Client(url, model="digits", retry=Retry(first_wait_s=1e-6)) as client:
        failed = [client.predict_many([b"image"] * 200, concurrency=1)]
        assert all(isinstance(answer, RequestFailed) for answers in failed for answer in answers)
    assert 200 + 10 <= len(asked) <= 200 + 10 + 20


def test_budget_is_never_more_than_its_most() -> None:
    budget = Budget(most=2, for_each_call=1)
    for _ in range(5):
        budget.earn()
    assert [budget.spend() for _ in range(3)] == [True, True, False]


@pytest.mark.parametrize("later", [False, True])
def test_many_images_are_answered_in_order_and_a_bad_one_costs_the_others_nothing(later: bool, tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(b"file")

    class Echo(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sent = self.rfile.read(int(self.headers["content-length"])).decode()
            body = json.dumps(GOOD | {"version": sent}).encode()
            self.send_response(400 if sent == "3" else 200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    images: list[bytes | Path] = [*(str(n).encode() for n in range(20)), tmp_path / "x.png"]
    with ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        url = f"http://127.0.0.1:{server.server_port}"

        async def ask() -> list[Prediction | RequestFailed]:
            async with AsyncClient(url, model="digits") as client:
                return await client.predict_many(images, concurrency=4)

        if later:
            answers = asyncio.run(ask())
        else:
            with Client(url, model="digits") as client:
                answers = client.predict_many(images, concurrency=4)
        server.shutdown()
    assert isinstance(answers[3], RequestFailed)
    seen = [answer.version for answer in answers if isinstance(answer, Prediction)]
    assert seen == [*(str(n) for n in range(20) if n != 3), "file"]
