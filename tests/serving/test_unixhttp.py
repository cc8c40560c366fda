"""HTTP over unix sockets."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from serving import unixhttp


@contextmanager
def server(path: Path, answer: bytes) -> Iterator[list[bytes]]:
    """Accept one connection, remember what was asked and send `answer`."""
    asked: list[bytes] = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                asked.append(connection.recv(65536))
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield asked
        thread.join()


def reply(body: bytes, status: int = 200) -> bytes:
    return f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def test_query_is_quoted_and_the_answer_decoded(tmp_path: Path) -> None:
    with server(tmp_path / "s", reply(b'{"status": "registered"}')) as asked:
        answer = unixhttp.call(tmp_path / "s", "POST", "/models", query={"url": "a b&c.mar"}, timeout_s=5)
    assert answer == (200, {"status": "registered"})
    assert asked[0].startswith(b"POST /models?url=a+b%26c.mar HTTP/1.1\r\n")


def test_answer_that_is_no_json_keeps_its_status(tmp_path: Path) -> None:
    with server(tmp_path / "s", reply(b"<html>", 500)):
        assert unixhttp.call(tmp_path / "s", "GET", "/", timeout_s=5) == (500, None)


def test_nobody_at_the_socket_is_an_oserror(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        unixhttp.call(tmp_path / "s", "GET", "/", timeout_s=5)


def test_silence_ends_with_the_timeout(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        begin = time.monotonic()
        with pytest.raises(TimeoutError):
            unixhttp.call(tmp_path / "s", "GET", "/", timeout_s=0.1)
    assert time.monotonic() - begin < 2
