"""The user's own graph as the user runs it: preprocessing in numpy, then ONNX Runtime on the file as it is.

What we make of the graph is compared with this. Shape legend: B batch, H height, W width, C channels, K classes.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from pipeline.errors import PipelineError
from pipeline.imported.file import GivenGraph, inspect, one_line
from pipeline.session import open_session
from serving.worker.contents import PackageError

SUM_TOLERANCE = 1e-2  # of probabilities in half precision
WARNING, FATAL = 2, 4  # of ONNX Runtime's log

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Normalisation:
    """(pixels / scale - mean) / std, with one value or one for each channel."""

    scale: float = 255.0
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)


@dataclass(frozen=True)
class Reference:
    """The file in a session of its own. Images go through it one by one, or as many as the graph is fixed to."""

    given: GivenGraph
    normalisation: Normalisation
    session: onnxruntime.InferenceSession

    def answers(self, images_BHWC: NDArray[np.uint8]) -> Floats:
        """Return what the graph answers, logits or probabilities, as float32 [B, K].

        Raises `PipelineError` when it does not run, or answers in another shape or with a value that is not finite.
        """
        x, size = self.prepare(images_BHWC), self.given.batch or 1
        parts: list[NDArray[np.float32]] = []
        for start in range(0, len(x), size):
            part = x[start : start + size]
            filled = np.concatenate([part, np.repeat(part[-1:], size - len(part), axis=0)])
            parts.append(self._run(filled)[: len(part)])
        return np.concatenate(parts)

    def prepare(self, images_BHWC: NDArray[np.uint8]) -> NDArray[np.generic]:
        """Return the images as the graph takes them: scaled and normalised unless it takes uint8, in its layout."""
        x: NDArray[np.generic] = images_BHWC
        if self.given.number != "uint8":
            mean, std = (np.array(v, np.float32) for v in (self.normalisation.mean, self.normalisation.std))
            x = (images_BHWC.astype(np.float32) / np.float32(self.normalisation.scale) - mean) / std
        return (x.transpose(0, 3, 1, 2) if self.given.layout == "nchw" else x).astype(self.given.number)

    def probabilities(self, images_BHWC: NDArray[np.uint8], *, softmax: bool) -> Floats:
        """Return float32 [B, K]."""
        answers = self.answers(images_BHWC)
        return softmax_of(answers) if softmax else answers

    def _run(self, x: NDArray[np.generic]) -> Floats:
        name = self.given.path.name
        try:
            (answer,) = self.session.run([self.given.output], {self.given.input: x})
        except Exception as error:  # onnxruntime's exceptions have no common base
            raise PipelineError(
                f"{name} does not run on an image of shape {list(x.shape)}: {one_line(error)}"
            ) from error
        if answer.ndim != 2 or len(answer) != len(x):
            raise PipelineError(f"{name} answers {len(x)} image(s) with the shape {list(answer.shape)}, not [B, K]")
        if not np.isfinite(answer).all():
            raise PipelineError(f"{name} answers an image with a value that is not finite", exit_status=1)
        return cast(Floats, answer.astype(np.float32))


def open_reference(path: Path, *, layout: str, normalisation: Normalisation) -> Reference:
    """Open the file on the CPU with one thread, as everything here; `PipelineError` when that fails."""
    given = inspect(path, layout=layout)
    if given.number == "uint8" and normalisation != Normalisation():
        raise PipelineError(
            f"{path.name} takes uint8, so it normalises by itself; leave out onnx.mean, onnx.std and onnx.scale"
        )
    return Reference(given, normalisation, open_graph(path))


def open_graph(path: Path) -> onnxruntime.InferenceSession:
    """Open a graph as a worker would; `PipelineError` names the file and what ONNX Runtime has against it."""
    onnxruntime.set_default_logger_severity(FATAL)  # of this session: what it would print is in our message
    try:
        return open_session(path)
    except PackageError as error:
        said = str(error).partition(": ")[2]
        raise PipelineError(f"{path.name}: ONNX Runtime cannot open it: {said}") from error
    finally:
        onnxruntime.set_default_logger_severity(WARNING)


def needs_softmax(answers_NK: Floats, *, asked: str, name: str) -> bool:
    """Tell whether the answers are logits: as asked, or by looking at them.

    Raises `PipelineError` when they are not what was asked for.
    """
    sums_NK = np.abs(answers_NK.sum(axis=1) - 1)
    distributions = bool((answers_NK >= 0).all() and (sums_NK <= SUM_TOLERANCE).all())
    if asked == "logits" and distributions and answers_NK.shape[1] > 1:
        raise PipelineError(f"onnx.outputs = 'logits', but every answer of {name} sums to 1; use probabilities")
    if asked == "probabilities" and not distributions:
        raise PipelineError(f"onnx.outputs = 'probabilities', but answers of {name} do not sum to 1; use logits")
    return not distributions


def softmax_of(logits_NK: Floats) -> Floats:
    """Return probabilities [N, K]."""
    powers = np.exp(logits_NK - logits_NK.max(axis=1, keepdims=True))
    return cast(Floats, powers / powers.sum(axis=1, keepdims=True))
