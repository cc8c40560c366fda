"""The typed Python clients of a served stack, used by the command line, the tests and the bench."""

import asyncio
import itertools
import random
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from serving.errors import StackError
from serving.topology import Timeouts

CLIENT_TIMEOUT_S = float(Timeouts().client_s)
CONCURRENCY = 8  # requests under way at once when there are many images


class RequestFailed(StackError):
    """The endpoint answered with an error; `http_status` is 0 when it did not answer at all."""

    def __init__(
        self, message: str, *, http_status: int, retry_after_s: float | None = None, timed_out: bool = False
    ) -> None:
        super().__init__(message)
        self.http_status = http_status
        self.retry_after_s = retry_after_s
        self.timed_out = timed_out

    @property
    def passes(self) -> bool:
        """Tell whether the same request may be answered soon. One that took too long would only take as long again."""
        return not self.timed_out and self.http_status in (0, 429, 502, 503)


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


@dataclass(frozen=True)
class Retry:
    """When a request is sent again; that is safe, since a prediction changes nothing. `attempts=1`: never."""

    attempts: int = 3
    first_wait_s: float = 0.1  # doubled each time, less a random part; at least what Retry-After says
    longest_wait_s: float = 5.0

    def wait_s(self, error: RequestFailed, *, attempt: int, left_s: float) -> float | None:
        """Return how long to wait before another attempt, or None when there is to be none."""
        wait_s = self.first_wait_s * 2 ** (attempt - 1) * random.uniform(0.5, 1)
        wait_s = max(wait_s, error.retry_after_s or 0)
        hopeless = not error.passes or attempt >= self.attempts or wait_s > min(left_s, self.longest_wait_s)
        return None if hopeless else wait_s


DEFAULT_RETRY = Retry()


class Budget:
    """How many retries a client may still send. Every call adds a tenth of one: no lasting fault is multiplied."""

    def __init__(self, *, most: float = 10.0, for_each_call: float = 0.1) -> None:
        self._left = self._most = most
        self._for_each_call = for_each_call
        self._lock = threading.Lock()

    def earn(self) -> None:
        """Note a call."""
        with self._lock:
            self._left = min(self._most, self._left + self._for_each_call)

    def spend(self) -> bool:
        """Take one retry; False when there is none left."""
        with self._lock:
            granted = self._left >= 1
            self._left -= granted
            return granted


class _Caller:
    """What the two clients share: where they send, how long they wait, and what they make of an answer."""

    def __init__(self, url: str, *, model: str, timeout_s: float, retry: Retry) -> None:
        self._url, self._path = url, f"/predictions/{model}"
        self._timeout_s, self._retry, self._budget = timeout_s, retry, Budget()

    def _options(self) -> dict[str, Any]:
        return {"base_url": self._url, "timeout": httpx.Timeout(self._timeout_s, connect=5), "trust_env": False}

    def _read(self, response: httpx.Response) -> Any:
        """Return the decoded JSON of a good answer; raises RequestFailed."""
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
            raise RequestFailed(f"the answer of {self._url} is no JSON", http_status=200) from error

    def _no_answer(self, error: httpx.HTTPError) -> RequestFailed:
        reason = str(error) or type(error).__name__
        late = isinstance(error, httpx.ReadTimeout | httpx.WriteTimeout)
        return RequestFailed(f"no answer from {self._url}: {reason}", http_status=0, timed_out=late)

    def _wait_s(self, error: RequestFailed, *, attempt: int, deadline: float) -> float:
        """Return how long to wait before another attempt; raises `error` when there is to be none."""
        wait_s = self._retry.wait_s(error, attempt=attempt, left_s=deadline - time.monotonic())
        if wait_s is None or not self._budget.spend():
            raise error
        return wait_s


class Client(_Caller):
    """A connection pool to one endpoint. Use it as a context manager, or call `close`. Threads may share it."""

    def __init__(
        self, url: str, *, model: str, timeout_s: float = CLIENT_TIMEOUT_S, retry: Retry = DEFAULT_RETRY
    ) -> None:
        super().__init__(url, model=model, timeout_s=timeout_s, retry=retry)
        self._http = httpx.Client(**self._options())

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
        return parse(self.post(_bytes_of(image), top_k=top_k))

    def predict_many(
        self, images: Iterable[bytes | Path], *, top_k: int | None = None, concurrency: int = CONCURRENCY
    ) -> list[Prediction | RequestFailed]:
        """Return an answer for each image, in order; one that fails is the error, and costs the others nothing."""

        def answer(image: bytes | Path) -> Prediction | RequestFailed:
            try:
                return self.predict(image, top_k=top_k)
            except RequestFailed as error:
                return error

        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(answer, images))

    def post(self, body: bytes, *, top_k: int | None = None) -> Any:
        """Send `body` as it is and return the decoded JSON answer; raises RequestFailed."""
        deadline = time.monotonic() + self._timeout_s
        self._budget.earn()
        for attempt in itertools.count(1):
            try:
                return self._read(self._http.post(self._path, content=body, params=_query(top_k)))
            except httpx.HTTPError as error:
                wait_s = self._wait_s(self._no_answer(error), attempt=attempt, deadline=deadline)
            except RequestFailed as error:
                wait_s = self._wait_s(error, attempt=attempt, deadline=deadline)
            time.sleep(wait_s)


class AsyncClient(_Caller):
    """The same for asyncio: use it with `async with`, or await `close`."""

    def __init__(
        self, url: str, *, model: str, timeout_s: float = CLIENT_TIMEOUT_S, retry: Retry = DEFAULT_RETRY
    ) -> None:
        super().__init__(url, model=model, timeout_s=timeout_s, retry=retry)
        self._http = httpx.AsyncClient(**self._options())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every connection."""
        await self._http.aclose()

    async def predict(self, image: bytes | Path, *, top_k: int | None = None) -> Prediction:
        """Return what `Client.predict` returns."""
        return parse(await self.post(_bytes_of(image), top_k=top_k))

    async def predict_many(
        self, images: Iterable[bytes | Path], *, top_k: int | None = None, concurrency: int = CONCURRENCY
    ) -> list[Prediction | RequestFailed]:
        """Return what `Client.predict_many` returns."""
        room = asyncio.Semaphore(concurrency)

        async def answer(image: bytes | Path) -> Prediction | RequestFailed:
            async with room:
                try:
                    return await self.predict(image, top_k=top_k)
                except RequestFailed as error:
                    return error

        return await asyncio.gather(*(answer(image) for image in images))

    async def post(self, body: bytes, *, top_k: int | None = None) -> Any:
        """Return what `Client.post` returns."""
        deadline = time.monotonic() + self._timeout_s
        self._budget.earn()
        for attempt in itertools.count(1):
            try:
                return self._read(await self._http.post(self._path, content=body, params=_query(top_k)))
            except httpx.HTTPError as error:
                wait_s = self._wait_s(self._no_answer(error), attempt=attempt, deadline=deadline)
            except RequestFailed as error:
                wait_s = self._wait_s(error, attempt=attempt, deadline=deadline)
            await asyncio.sleep(wait_s)


def _bytes_of(image: bytes | Path) -> bytes:
    return image.read_bytes() if isinstance(image, Path) else image


def _query(top_k: int | None) -> dict[str, int] | None:
    return None if top_k is None else {"top_k": top_k}


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
