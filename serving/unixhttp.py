"""HTTP over a unix socket, for TorchServe's management API, with the standard library only."""

import http.client
import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode


class UnixConnection(http.client.HTTPConnection):
    """An HTTP connection to the socket at `path`; every wait ends after `timeout_s`."""

    def __init__(self, path: Path, *, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self.path = path

    def connect(self) -> None:
        """Connect to the socket file; raises OSError (also on timeout)."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        try:
            self.sock.connect(str(self.path))
        except OSError:
            self.close()
            raise


class Reply(NamedTuple):
    """A status and the decoded JSON body (None when it is not JSON)."""

    status: int
    body: Any


def call(path: Path, method: str, target: str, *, query: Mapping[str, object] | None = None, timeout_s: float) -> Reply:
    """Send one request without a body and return its reply.

    Raises OSError when nobody answers within `timeout_s` and http.client.HTTPException on a broken answer.
    """
    connection = UnixConnection(path, timeout_s=timeout_s)
    try:
        connection.request(method, f"{target}?{urlencode(query)}" if query else target)
        response = connection.getresponse()
        raw = response.read()
    finally:
        connection.close()
    try:
        return Reply(response.status, json.loads(raw))
    except ValueError:
        return Reply(response.status, None)
