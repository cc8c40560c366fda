"""A handler outside of TorchServe: what it is handed, and what it answers to one batch of rows."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from serving.worker.handler import Handler


class FakeContext:
    """What TorchServe hands a handler, as far as it is used, with what was set in it."""

    def __init__(self, directory: Path, *, headers: Sequence[dict[str, str]] = ()) -> None:
        self.system_properties: dict[str, Any] = {"model_dir": str(directory), "gpu_id": None}
        self.headers = list(headers)
        self.statuses: dict[int, int] = {}
        self.types: dict[int, str] = {}
        self.sent: dict[int, dict[str, str]] = {}

    def get_request_header(self, idx: int, key: str) -> str | None:
        return self.headers[idx].get(key) if idx < len(self.headers) else None

    def set_response_content_type(self, idx: int, value: str) -> None:
        self.types[idx] = value

    def set_response_header(self, idx: int, key: str, value: str) -> None:
        self.sent[idx] = {key: value}

    def set_response_status(self, code: int = 200, phrase: str = "", idx: int = 0) -> None:
        self.statuses[idx] = code


class Answers:
    """The answers to one batch."""

    def __init__(self, served: Handler, rows: Sequence[dict[str, Any]], context: FakeContext) -> None:
        bodies = served.handle(rows, context)
        assert all(isinstance(body, bytes) for body in bodies)
        assert context.types == dict.fromkeys(range(len(rows)), "application/json")
        self.statuses = [context.statuses[idx] for idx in range(len(rows))]
        self.bodies: list[Any] = [json.loads(body, parse_constant=pytest.fail) for body in bodies]

    def best(self, idx: int = 0) -> str:
        """Return the first label of the answer for one image."""
        return str(self.bodies[idx]["predictions"][0]["label"])


def initialize(directory: Path) -> Handler:
    served = Handler()
    served.initialize(FakeContext(directory))
    return served
