"""Which values the tensors of a graph take: one pass of images, a histogram of each, and ranges from the histograms."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray

from pipeline.errors import PipelineError

BINS = 2048  # on each side of zero
LEVELS = 256  # of an int8 activation
CHUNK_BYTES = 256 << 20  # of tensors that one run may give back
PERCENTILE = 99.99  # share of the values that the range of that name holds, in percent
CANDIDATES = 64  # thresholds that the entropy method compares
LOWEST = 0.2  # the lowest of them, as a share of the largest value
UNSEEN = 1e-9  # probability of what a quantized distribution does not have
SMALLEST_LIMIT = 1e-30
BLOCK = 1 << 16  # values counted at once: they stay in the cache

Range = tuple[float, float]
Counts = NDArray[np.int64]


@dataclass(frozen=True)
class Histogram:
    """How often a tensor took which value. `limit` is a power of two, so a wider one has exactly half the bins."""

    counts: Counts  # [2 * BINS], over [-limit, limit]
    limit: float
    low: float
    high: float

    @staticmethod
    def of(values: NDArray[np.float32]) -> "Histogram":
        """Count `values`, which are finite and at least one."""
        low, high = float(values.min()), float(values.max())
        limit = float(2.0 ** np.frexp(max(-low, high, SMALLEST_LIMIT))[1])  # above every value
        flat, scale, counts = values.ravel(), np.float32(BINS / limit), np.zeros(2 * BINS + 1, np.int64)
        for start in range(0, flat.size, BLOCK):
            bins = (flat[start : start + BLOCK] * scale + np.float32(BINS)).astype(np.intp)
            counts += np.bincount(bins, minlength=2 * BINS + 1)
        counts[-2] += counts[-1]  # just below the limit float32 rounds up to it
        return Histogram(counts[:-1], limit, low, high)

    def widened(self, limit: float) -> "Histogram":
        """Return the same counts in bins that reach to `limit`."""
        counts, reached = self.counts, self.limit
        while reached < limit:
            padding = np.zeros(BINS // 2, np.int64)
            counts = np.concatenate([padding, counts.reshape(-1, 2).sum(axis=1), padding])
            reached *= 2
        return Histogram(counts, reached, self.low, self.high)

    def __add__(self, other: "Histogram") -> "Histogram":
        limit = max(self.limit, other.limit)
        counts = self.widened(limit).counts + other.widened(limit).counts
        return Histogram(counts, limit, min(self.low, other.low), max(self.high, other.high))

    def range_by(self, method: str) -> Range:
        """Return the range to quantize: `minmax`, `percentile` or `entropy`."""
        if method == "minmax":
            return self.low, self.high
        return self._percentile() if method == "percentile" else self._entropy()

    def _clipped(self, low: float, high: float) -> Range:
        return max(self.low, low), min(self.high, high)

    def _percentile(self) -> Range:
        """Cut the same share of the values off at both ends."""
        edges = np.linspace(-self.limit, self.limit, 2 * BINS + 1)
        share = np.cumsum(self.counts) / self.counts.sum()
        cut = (1 - PERCENTILE / 100) / 2
        first, last = np.searchsorted(share, [cut, 1 - cut])
        return self._clipped(float(edges[first]), float(edges[min(last, 2 * BINS - 1) + 1]))

    def _entropy(self) -> Range:
        """Return the threshold at which the quantized distribution tells the most about the true one.

        Kullback-Leibler divergence over thresholds symmetric about zero, as Migacz (GTC 2017) does for TensorRT. Zero
        itself is left out: it has a level of its own whatever the threshold.
        """
        counts = self.counts.copy()
        counts[BINS] = 0
        filled = np.flatnonzero(counts)
        if not filled.size:
            return self.low, self.high
        used = int(max(BINS - filled[0], filled[-1] + 1 - BINS))
        widths = np.unique(np.linspace(max(1, used * LOWEST), used, CANDIDATES).astype(np.int64))
        first = 0 if self.low < 0 else BINS
        losses = [_divergence(counts, max(first, BINS - int(w)), BINS + int(w)) for w in widths]
        threshold = self.limit * int(widths[int(np.argmin(losses))]) / BINS
        return self._clipped(-threshold, threshold)


def collect(
    model: onnx.ModelProto, names: Sequence[str], inputs: NDArray[Any], *, batch: int | None
) -> dict[str, Histogram]:
    """Run `inputs` [N, ...] once through the graph and return a histogram of each tensor in `names`.

    `batch` is the graph's batch size where that is fixed; else a run takes as many images as `CHUNK_BYTES` allow.
    Raises `PipelineError` that names a tensor whose values are not finite.
    """
    session = _session_with(model, names)
    taken = session.get_inputs()[0].name
    found: dict[str, Histogram] = {}
    start, size = 0, batch or 1
    while start < len(inputs):
        chunk = inputs[start : start + size]
        start += size
        if batch is not None and len(chunk) < batch:
            chunk = np.resize(chunk, (batch, *chunk.shape[1:]))
        tensors = session.run(list(names), {taken: chunk})
        for name, values in zip(names, tensors, strict=True):
            if not np.isfinite(values).all():
                raise PipelineError(f"cannot quantise: tensor {name} takes values that are not finite", exit_status=1)
            histogram = Histogram.of(values)
            found[name] = found[name] + histogram if name in found else histogram
        if batch is None:
            size = max(1, len(chunk) * CHUNK_BYTES // sum(values.nbytes for values in tensors))
    return found


def _session_with(model: onnx.ModelProto, names: Sequence[str]) -> onnxruntime.InferenceSession:
    """Open the graph with the tensors in `names` among its outputs."""
    augmented = onnx.ModelProto()
    augmented.CopyFrom(model)
    given = {output.name for output in augmented.graph.output}
    augmented.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in given)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1  # more threads might sum in another order
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(augmented.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _divergence(counts: Counts, first: int, end: int) -> float:
    """Return what is lost when bins `first` to `end` become `LEVELS` levels and what lies outside is clipped."""
    inside = counts[first:end]
    true = inside.astype(np.float64)
    true[0] += counts[:first].sum()
    true[-1] += counts[end:].sum()
    level = np.arange(end - first) * LEVELS // (end - first)
    filled = inside > 0
    total = np.bincount(level, weights=inside, minlength=LEVELS)
    bins = np.bincount(level, weights=filled, minlength=LEVELS)
    spread = np.where(filled, (total / np.maximum(bins, 1))[level], 0)
    seen = true > 0
    p, q = true / true.sum(), np.maximum(spread / max(spread.sum(), 1), UNSEEN)
    return float((p[seen] * np.log(p[seen] / q[seen])).sum())
