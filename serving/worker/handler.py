"""The TorchServe service: a batch of rows in, one answer for each row out, every image of the batch in one run.

Shape legend: H height, W width, C channels, K classes, N images of all rows together.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from .infer import InferRequest, answer_infer, infer_error, read_infer
from .model import Model, Probabilities, load_model
from .preprocess import BadImage, Pixels
from .protocol import (
    JSON_TYPE,
    MAX_DECODED_BYTES,
    Refused,
    Request,
    answer_bytes,
    error_bytes,
    inflate,
    read_request,
    refuse_image,
)

logger = logging.getLogger(__name__)

# Set by the balancer, which takes away whatever a client sends under these names.
TOP_K_HEADER = "x-top-k"  # from the query
LIMIT_HEADER = "x-body-limit"  # in bytes, beside a Content-Encoding
INFER_HEADER = "x-infer"  # Open Inference Protocol: the length of the JSON, or "json" when all of the body is JSON
INFER_LENGTH = "inference-header-content-length"
BINARY_TYPE = "application/octet-stream"


class Context(Protocol):
    """The part of TorchServe's context that is used."""

    @property
    def system_properties(self) -> Mapping[str, Any]:
        """What TorchServe tells a worker about its place."""

    def get_request_header(self, idx: int, key: str) -> str | None:
        """Return a header of row `idx`."""

    def set_response_content_type(self, idx: int, value: str) -> None:
        """Set the type of the answer of row `idx`."""

    def set_response_header(self, idx: int, key: str, value: str) -> None:
        """Set a header of the answer of row `idx`."""

    def set_response_status(self, code: int = 200, phrase: str = "", idx: int = 0) -> None:
        """Set the status of the answer of row `idx`."""


@dataclass
class Job:
    """One row on its way: what it asks for, its decoded images, or why it is refused."""

    request: Request | InferRequest | None = None
    images: list[Pixels] = field(default_factory=list)
    refused: Refused | None = None
    infer: bool = False  # by the Open Inference Protocol


@dataclass(frozen=True)
class Answer:
    """What goes back for one row. `json_length`: that many bytes of the body are JSON, and tensors follow."""

    status: int
    body: bytes
    json_length: int | None = None


class Handler:
    """Holds the loaded model between batches."""

    def __init__(self) -> None:
        self._model: Model | None = None

    def initialize(self, context: Context) -> None:
        """Load the unpacked archive; raises PackageError, so that the worker never becomes ready."""
        properties = context.system_properties
        self._model = load_model(Path(properties["model_dir"]), gpu_id=properties.get("gpu_id"))

    def handle(self, rows: Sequence[Mapping[str, Any]], context: Context) -> list[bytes]:
        """Return one JSON answer for each row; the status and the type of each are set in `context`."""
        model = self._model
        assert model is not None, "TorchServe initializes before it handles"
        jobs = [_prepare(model, row, context, idx) for idx, row in enumerate(rows)]
        answers = iter(_run(model, jobs))
        bodies = []
        for idx, job in enumerate(jobs):
            probabilities = [next(answers) for _ in job.images]
            answer = _answer(model, job, probabilities)
            context.set_response_content_type(idx, JSON_TYPE if answer.json_length is None else BINARY_TYPE)
            if answer.json_length is not None:
                context.set_response_header(idx, INFER_LENGTH, str(answer.json_length))
            context.set_response_status(code=answer.status, idx=idx)
            bodies.append(answer.body)
        return bodies


def _prepare(model: Model, row: Mapping[str, Any], context: Context, idx: int) -> Job:
    """Read and decode one row. Whatever goes wrong stays with this row: its batch-mates are other clients."""
    asked = context.get_request_header(idx, INFER_HEADER)
    job = Job(infer=asked is not None)
    try:
        row = _inflated(row, context, idx)
        if asked is None:
            job.request = read_request(row, top_k=context.get_request_header(idx, TOP_K_HEADER))
        else:
            job.request = read_infer(_whole(row), _json_length(asked), spec=model.preprocessing)
        job.images = _decoded(model, job.request)
    except Refused as error:
        job.refused = error
    except MemoryError:
        job.refused = Refused(503, "out_of_memory", "not enough memory for this image now; try again later")
    except Exception:  # an error that leaves the handler would answer 503 to every request of the batch
        logger.exception("a request could not be read")
        job.refused = _internal()
    return job


def _inflated(row: Mapping[str, Any], context: Context, idx: int) -> Mapping[str, Any]:
    """Return the row without its Content-Encoding; what a plain TorchServe took apart never had one."""
    encoding = context.get_request_header(idx, "content-encoding")
    if encoding is None:
        return row
    limit = context.get_request_header(idx, LIMIT_HEADER)
    return {"body": inflate(_whole(row), encoding, most=int(limit) if limit else MAX_DECODED_BYTES)}


def _whole(row: Mapping[str, Any]) -> bytes:
    """Return the body, as bytes, of a row that is nothing but a body."""
    (value,) = row.values() if len(row) == 1 else (None,)
    if not isinstance(value, (bytes, bytearray)):
        raise Refused(400, "bad_json", "the body must be bytes of the type that its headers name")
    return bytes(value)


def _json_length(asked: str) -> int | None:
    """Read what the balancer made of Inference-Header-Content-Length."""
    if asked == "json":
        return None
    if not (asked.isascii() and asked.isdecimal() and len(asked) < 16):
        raise Refused(400, "bad_tensor", "Inference-Header-Content-Length must be a whole number")
    return int(asked)


def _decoded(model: Model, request: Request | InferRequest) -> list[Pixels]:
    if isinstance(request, InferRequest):
        if request.pixels is not None:
            return list(request.pixels)
        return [_decode(model, image, position) for position, image in enumerate(request.images)]
    listed = request.listed
    return [_decode(model, image, at if listed else None) for at, image in enumerate(request.images)]


def _decode(model: Model, image: bytes, position: int | None) -> Pixels:
    try:
        return model.decode(image)
    except BadImage as error:
        raise refuse_image(error, position) from error


def _run(model: Model, jobs: list[Job]) -> Sequence[Probabilities]:
    """Return [K] for every decoded image, in order; when the run fails, every row that has one is refused."""
    images = [image for job in jobs for image in job.images]
    if not images:
        return []
    try:
        return list(model.run(np.stack(images)))
    except Exception:  # likewise: those of the batch that were refused for their own reasons keep their answers
        logger.exception("the model could not be run")
        for job in jobs:
            if job.images:
                job.images, job.refused = [], _internal()
        return []


def _answer(model: Model, job: Job, probabilities: list[Probabilities]) -> Answer:
    """Return the answer to one row."""
    refused = job.refused
    if refused is None and not all(np.isfinite(answer_K).all() for answer_K in probabilities):
        refused = Refused(500, "non_finite_output", "model produced non-finite output")
    if refused is not None:
        return Answer(refused.status, (infer_error if job.infer else error_bytes)(refused))
    request = job.request
    assert request is not None
    if isinstance(request, InferRequest):
        answers_BK = np.stack(probabilities)
        body, json_length = answer_infer(
            request, answers_BK, name=model.name, version=model.version, labels=model.labels
        )
        return Answer(200, body, json_length)
    ranked = [rank(model, answer_K, top_k=request.top_k) for answer_K in probabilities]
    answer = {
        "predictions": ranked if request.listed else ranked[0],
        "model": model.name,
        "version": model.version,
        "digest": model.digest,
    }
    return Answer(200, answer_bytes(answer))


def rank(model: Model, answer_K: Probabilities, *, top_k: int) -> list[dict[str, Any]]:
    """Return the likeliest classes, at most all of them; equal ones in the order of their index."""
    best = np.argsort(-answer_K, kind="stable")[:top_k].tolist()
    return [{"label": model.labels[k], "index": k, "probability": float(answer_K[k])} for k in best]


def _internal() -> Refused:
    return Refused(500, "internal_error", "the request could not be answered; the fault is ours")
