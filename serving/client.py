"""The typed Python client of a served stack, used by the command line, the tests and the bench."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from serving.errors import StackError
from serving.topology import Timeouts

CLIENT_TIMEOUT_S = float(Timeouts().client_s)


class RequestFailed(StackError):
    """The endpoint answered with an error; `http_status` is 0 when it did not answer at all."""

    def __init__(self, message: str, *, http_status: int, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.http_status = http_status
        self.retry_after_s = retry_after_s


@dataclass(frozen=True)
class Candidate:
    """One class with its probability."""

    label: str
    index: int
    probability: float


@dataclass(frozen=True)
class Prediction:
    """The answer for one image: candidates by falling probability, and which model gave it."""

    predictions: tuple[Candidate, ...]
    model: str
    version: str
    digest: str


class Client:
    """A connection pool to one endpoint. Use it as a context manager, or call `close`."""

    def __init__(self, url: str, *, model: str, timeout_s: float = CLIENT_TIMEOUT_S) -> None:
        # Only a connection that could not be made is tried again: then nothing was sent.
        self._http = httpx.Client(
            base_url=url,
            timeout=httpx.Timeout(timeout_s, connect=5),
            transport=httpx.HTTPTransport(retries=2),
            trust_env=False,
        )
        self._path = f"/predictions/{model}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every connection."""
        self._http.close()

    def predict(self, image: bytes | Path, *, top_k: int | None = None) -> Prediction:
        """Return the `top_k` likeliest classes of one encoded image (bytes, or the path of a file).

        Raises RequestFailed with the endpoint's own message, also when nothing answers.
        """
        payload = self.post(image.read_bytes() if isinstance(image, Path) else image, top_k=top_k)
        return parse(payload)

    def post(self, body: bytes, *, top_k: int | None = None) -> Any:
        """Send `body` as it is and return the decoded JSON answer; raises RequestFailed."""
        try:
            response = self._http.post(self._path, content=body, params=None if top_k is None else {"top_k": top_k})
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise RequestFailed(f"no answer from {self._http.base_url}: {reason}", http_status=0) from error
        if response.status_code != 200:
            retry_after = response.headers.get("retry-after")
            raise RequestFailed(
                f"{response.status_code}: {error_message(response)}",
                http_status=response.status_code,
                retry_after_s=float(retry_after) if retry_after and retry_after.isdecimal() else None,
            )
        try:
            return response.json()
        except ValueError as error:
            raise RequestFailed(f"the answer of {self._http.base_url} is no JSON", http_status=200) from error


def error_message(response: httpx.Response) -> str:
    """Return the message of an error answer, whatever its shape."""
    try:
        error = response.json()["error"]
        return str(error["message"] if isinstance(error, Mapping) else error)
    except (ValueError, KeyError, TypeError):
        return response.reason_phrase


def parse(payload: Any) -> Prediction:
    """Turn the endpoint's JSON for one image into a Prediction; raises RequestFailed when it has another shape."""
    try:
        return Prediction(
            predictions=tuple(
                Candidate(label=str(item["label"]), index=int(item["index"]), probability=float(item["probability"]))
                for item in payload["predictions"]
            ),
            model=payload["model"],
            version=payload["version"],
            digest=payload["digest"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise RequestFailed(f"unexpected answer: {payload!r:.200}", http_status=200) from error
