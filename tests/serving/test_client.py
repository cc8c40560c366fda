"""The typed client against endpoints that answer well, badly, or not at all."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from serving.client import Candidate, Client, RequestFailed
from tests.stacks import free_port

GOOD = {
    "predictions": [{"label": "seven", "index": 7, "probability": 0.9}],
    "model": "digits",
    "version": "1",
    "digest": "d",
}


@contextmanager
def endpoint(status: int, body: bytes, headers: dict[str, str] | None = None) -> Iterator[tuple[str, list[str]]]:
    """Answer every POST the same way; yields the address and the list of what was asked."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(f"{self.path} {self.rfile.read(int(self.headers['content-length'])).decode()}")
            self.send_response(status)
            for name, value in {"content-length": str(len(body)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
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
        Client(url, model="digits") as client,
        pytest.raises(RequestFailed, match="503: no room") as caught,
    ):
        client.predict(b"image")
    assert (caught.value.http_status, caught.value.retry_after_s) == (503, 2.0)
    assert len(asked) == 1  # an answer is never asked for twice


def test_error_that_is_no_json_gives_its_reason() -> None:
    with (
        endpoint(502, b"<html>") as (url, _),
        Client(url, model="digits") as client,
        pytest.raises(RequestFailed, match="502: Bad Gateway"),
    ):
        client.predict(b"image")


def test_nobody_listening_is_one_line() -> None:
    with (
        Client(f"http://127.0.0.1:{free_port()}", model="digits") as client,
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
        Client(url, model="digits") as client,
        pytest.raises(RequestFailed, match="503") as caught,
    ):
        client.post(b"image")
    assert caught.value.retry_after_s is None
