"""The TorchServe service: a batch of rows in, one answer for each row out, every image of the batch in one run.

Shape legend: H height, W width, C channels, K classes, N images of all rows together.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from .model import Model, Probabilities, load_model
from .preprocess import BadImage, Pixels
from .protocol import JSON_TYPE, Refused, Request, answer_bytes, error_bytes, read_request, refuse_image

logger = logging.getLogger(__name__)

TOP_K_HEADER = "x-top-k"  # set by the balancer from the query


class Context(Protocol):
    """The part of TorchServe's context that is used."""

    @property
    def system_properties(self) -> Mapping[str, Any]:
        """What TorchServe tells a worker about its place."""

    def get_request_header(self, idx: int, key: str) -> str | None:
        """Return a header of row `idx`."""

    def set_response_content_type(self, idx: int, value: str) -> None:
        """Set the type of the answer of row `idx`."""

    def set_response_status(self, code: int = 200, phrase: str = "", idx: int = 0) -> None:
        """Set the status of the answer of row `idx`."""


@dataclass
class Job:
    """One row on its way: what it asks for, its decoded images, or why it is refused."""

    request: Request | None = None
    images: list[Pixels] = field(default_factory=list)
    refused: Refused | None = None


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
            status, body = _answer(model, job, probabilities)
            context.set_response_content_type(idx, JSON_TYPE)
            context.set_response_status(code=status, idx=idx)
            bodies.append(body)
        return bodies


def _prepare(model: Model, row: Mapping[str, Any], context: Context, idx: int) -> Job:
    """Read and decode one row. Whatever goes wrong stays with this row: its batch-mates are other clients."""
    try:
        request = read_request(row, top_k=context.get_request_header(idx, TOP_K_HEADER))
        return Job(request, [_decode(model, request, position) for position in range(len(request.images))])
    except Refused as error:
        return Job(refused=error)
    except MemoryError:
        return Job(refused=Refused(503, "out_of_memory", "not enough memory for this image now; try again later"))
    except Exception:  # an error that leaves the handler would answer 503 to every request of the batch
        logger.exception("a request could not be read")
        return Job(refused=_internal())


def _decode(model: Model, request: Request, position: int) -> Pixels:
    try:
        return model.decode(request.images[position])
    except BadImage as error:
        raise refuse_image(error, position if request.listed else None) from error


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


def _answer(model: Model, job: Job, probabilities: list[Probabilities]) -> tuple[int, bytes]:
    """Return status and body for one row."""
    refused = job.refused
    if refused is None and not all(np.isfinite(answer_K).all() for answer_K in probabilities):
        refused = Refused(500, "non_finite_output", "model produced non-finite output")
    if refused is not None:
        return refused.status, error_bytes(refused)
    assert job.request is not None
    ranked = [rank(model, answer_K, top_k=job.request.top_k) for answer_K in probabilities]
    return 200, answer_bytes(
        {
            "predictions": ranked if job.request.listed else ranked[0],
            "model": model.name,
            "version": model.version,
            "digest": model.digest,
        }
    )


def rank(model: Model, answer_K: Probabilities, *, top_k: int) -> list[dict[str, Any]]:
    """Return the likeliest classes, at most all of them; equal ones in the order of their index."""
    best = np.argsort(-answer_K, kind="stable")[:top_k].tolist()
    return [{"label": model.labels[k], "index": k, "probability": float(answer_K[k])} for k in best]


def _internal() -> Refused:
    return Refused(500, "internal_error", "the request could not be answered; the fault is ours")
