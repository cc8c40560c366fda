"""Static int8 of an ONNX graph: calibrated ranges, layers that hurt given back, saturation tested on this machine.

Shape legend: N images, K classes.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray

from pipeline.compression import qdq
from pipeline.compression.ranges import Range, collect
from pipeline.compression.sensitivity import Loss, give_back
from pipeline.errors import PipelineError
from pipeline.machine import cpu_facts

BATCH = 32  # images in one run, where the graph takes any number
SAME = 0.999  # share of images that must keep their top-1 when sums cannot saturate
SMALLER = 1.5  # a file that is not so many times smaller is worth a warning
SAMPLE = 2  # batches on which a layer's own error is measured
SHOWN = 5  # layers named in a message

Floats = NDArray[np.float32]
Batches = Callable[[int], Iterable[NDArray[Any]]]


@dataclass(frozen=True)
class Trial:
    """One way of finding ranges, judged on the validation images."""

    method: str
    top1: float
    agreement: float  # share of images with the float graph's top-1
    error: float  # mean absolute, of an answer


@dataclass(frozen=True)
class Static:
    """What was made, and how it compares with the float graph."""

    trial: Trial  # the one kept, after layers were given back
    bits: int  # of a weight; 7 is what ONNX Runtime calls reduce_range
    cpu_flags: tuple[str, ...]
    opset: int
    layers: int  # in int8
    given_back: tuple[Loss, ...]  # layers that stay float32, with the error that each causes alone
    float_top1: float
    unsaturated: float  # share of images with the same top-1 when sums cannot saturate
    ratio: float  # float bytes / int8 bytes
    trials: tuple[Trial, ...]
    operators: dict[str, int]  # that run on this machine
    facts: dict[str, str]  # what was chosen, as the graph's metadata holds it
    notes: tuple[str, ...]  # what the user should hear


@dataclass(frozen=True)
class Calibrated:
    """A graph and the ranges of its tensors, by method."""

    graph: qdq.Graph
    ranges: dict[str, dict[str, Range]]

    def model(self, method: str, *, bits: int, without: Collection[str] = ()) -> onnx.ModelProto:
        """Return the int8 graph in which the layers `without` are float32."""
        nodes = qdq.selection(self.graph, without=without)
        return qdq.quantize(self.graph, self.ranges[method], nodes=nodes, bits=bits)


@dataclass(frozen=True)
class Judge:
    """The validation images with the float graph's answers to them."""

    batches: Batches
    labels_N: NDArray[np.int64]
    batch: int | None  # the only batch size that the graph takes
    reference_NK: Floats

    def top1(self, answers_NK: Floats) -> float:
        """Return the share of right answers, in [0, 1]."""
        return float((answers_NK.argmax(1) == self.labels_N).mean())

    def answers(self, model: onnx.ModelProto, *, most: int | None = None, precise: bool = False) -> Floats:
        """Return the graph's answers to all images, or to `most` batches of them; `precise`: no sum saturates."""
        session = open_graph(model.SerializeToString(), precise=precise)
        return answers_of(session, islice(self.batches(self.batch or BATCH), most), batch=self.batch)

    def unsaturated(self, model: onnx.ModelProto) -> float:
        """Return the share of images whose top-1 stays the same where no sum can saturate."""
        return float((self.answers(model).argmax(1) == self.answers(model, precise=True).argmax(1)).mean())

    def trial(self, method: str, model: onnx.ModelProto) -> Trial:
        """Compare an int8 graph with the float one."""
        answers_NK = self.answers(model)
        agreement = float((answers_NK.argmax(1) == self.reference_NK.argmax(1)).mean())
        return Trial(method, self.top1(answers_NK), agreement, float(np.abs(answers_NK - self.reference_NK).mean()))


def quantize_static(
    source: Path,
    out: Path,
    *,
    images: NDArray[Any],
    validation: Batches,
    labels: NDArray[np.int64],
    methods: Sequence[str],
    max_loss: float,
    bits: int,
    metadata: Mapping[str, str] | None = None,
) -> Static:
    """Write to `out` a copy of the graph `source` whose convolutions are int8, and return how it was made.

    `images` [N, ...] calibrate it, as the graph takes them; `validation(size)` yields other images, `size` at a time,
    whose classes are `labels` [N]. Of the `methods` (`minmax`, `entropy`, `percentile`) the best on the validation
    images is kept. The graph's first output is what counts, its last axis the classes. `bits` (7 or 8) are a weight's;
    8 become 7 where sums would saturate. `metadata` is added to the graph's own.

    Layers are given back to float32 until at most `max_loss` points of top-1 are lost. Raises `PipelineError` when
    that does not help, and for a graph that cannot be quantized: "cannot quantise: node X because Y". `source` is
    left as it is and nothing is written beside it; the same arguments give the same bytes.
    """
    graph = qdq.prepare(source)
    histograms = collect(graph.model, qdq.tensors_of(graph), images, batch=graph.batch)
    ranges = {m: {name: histogram.range_by(m) for name, histogram in histograms.items()} for m in methods}
    calibrated = Calibrated(graph, ranges)
    judge = judge_of(source, graph, validation, labels)
    notes: list[str] = []
    for width in dict.fromkeys((bits, 7)):
        trials = tuple(judge.trial(method, calibrated.model(method, bits=width)) for method in methods)
        kept, given_back = _within(max_loss, calibrated, judge, trials, bits=width)
        without = {loss.layer for loss in given_back}
        model = calibrated.model(kept.method, bits=width, without=without)
        unsaturated = judge.unsaturated(model)
        if unsaturated >= SAME:
            break
        notes.append(f"sums of {width}-bit weights saturate on this CPU: only {unsaturated:.2%} of the answers stand")
    else:
        raise PipelineError(f"{source.name} has no int8 graph: {'; '.join(notes)}", exit_status=1)
    flags = tuple(cpu_facts()["flags"])
    facts = _facts(kept.method, bits=width, flags=flags, given_back=given_back)
    _write(model, out, metadata=_metadata(source) | dict(metadata or {}) | facts)
    ratio = qdq.weight_bytes(source) / out.stat().st_size
    operators = qdq.census(model)
    return Static(
        trial=kept,
        bits=width,
        cpu_flags=flags,
        opset=next(o.version for o in model.opset_import if o.domain == ""),
        layers=len(qdq.layers_of(graph, without=without)),
        given_back=given_back,
        float_top1=judge.top1(judge.reference_NK),
        unsaturated=unsaturated,
        ratio=ratio,
        trials=trials,
        operators=operators,
        facts=facts,
        notes=(*notes, *_notes(given_back, operators, ratio=ratio, name=out.name)),
    )


def spread(labels_N: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Return the positions of up to `count` images, in order: as many of each class, evenly spaced over the split."""
    classes = [np.flatnonzero(labels_N == label) for label in np.unique(labels_N)]
    each = -(-count // len(classes))
    even = [members[np.arange(n) * len(members) // n] for members in classes for n in [min(each, len(members))]]
    turns = [members[turn] for turn in range(each) for members in even if turn < len(members)]
    return np.sort(np.array(turns[:count], dtype=np.int64))


def judge_of(source: Path, graph: qdq.Graph, validation: Batches, labels: NDArray[np.int64]) -> Judge:
    """Ask the float graph, as it is in the file, for its answers."""
    answers_NK = answers_of(open_graph(str(source)), validation(graph.batch or BATCH), batch=graph.batch)
    return Judge(validation, labels, graph.batch, answers_NK)


def open_graph(graph: str | bytes, *, precise: bool = False) -> onnxruntime.InferenceSession:
    """Open a path or a serialized graph with one thread; `precise` avoids the instructions whose sums saturate."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.x64quantprecision", str(int(precise)))
    return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


def answers_of(
    session: onnxruntime.InferenceSession, batches: Iterable[NDArray[Any]], *, batch: int | None = None
) -> Floats:
    """Return the first output, float32 [N, K], for all images; a graph of fixed `batch` gets full batches only."""
    taken, given = session.get_inputs()[0].name, session.get_outputs()[0].name
    answers: list[Floats] = []
    for chunk in batches:
        full = chunk if batch is None else np.resize(chunk, (batch, *chunk.shape[1:]))
        answers.append(session.run([given], {taken: full})[0].reshape(len(full), -1)[: len(chunk)])
    return np.concatenate(answers)


def _within(
    max_loss: float, calibrated: Calibrated, judge: Judge, trials: Sequence[Trial], *, bits: int
) -> tuple[Trial, tuple[Loss, ...]]:
    """Return the best trial, made again without as many layers as it takes to lose at most `max_loss` points."""
    best = max(trials, key=lambda trial: (trial.top1, trial.agreement, -trial.error))
    wanted = judge.top1(judge.reference_NK) - max_loss / 100 - 1e-9
    if best.top1 >= wanted:
        return best, ()
    graph, ranges = calibrated.graph, calibrated.ranges[best.method]
    losses: list[Loss] = []
    for layer in qdq.layers_of(graph):
        answers_NK = judge.answers(qdq.quantize(graph, ranges, nodes=qdq.alone(graph, layer), bits=bits), most=SAMPLE)
        losses.append(Loss(layer, float(np.abs(answers_NK - judge.reference_NK[: len(answers_NK)]).mean())))

    def holds(without: Collection[str]) -> bool:
        return not qdq.layers_of(graph, without=without) or trial(without).top1 >= wanted

    def trial(without: Collection[str]) -> Trial:
        return judge.trial(best.method, calibrated.model(best.method, bits=bits, without=without))

    given_back = give_back(losses, holds=holds)
    without = {loss.layer for loss in given_back}
    if not qdq.layers_of(graph, without=without):
        lost = (judge.top1(judge.reference_NK) - best.top1) * 100
        worst = ", ".join(f"{loss.layer} ({loss.error:.2g})" for loss in given_back[:SHOWN])
        raise PipelineError(
            f"int8 loses {lost:.2f} points, {max_loss:g} are allowed, and no layer could stay int8; worst: {worst}",
            exit_status=1,
        )
    return trial(without), given_back


def _facts(method: str, *, bits: int, flags: Sequence[str], given_back: Sequence[Loss]) -> dict[str, str]:
    """Return the flags that were chosen, as the graph's metadata and the manifest hold them."""
    return {
        "static_method": method,
        "static_weight_bits": str(bits),
        "static_reduce_range": str(bits == 7).lower(),
        "static_cpu_flags": " ".join(flags),
        "static_float_layers": " ".join(loss.layer for loss in given_back),
    }


def _metadata(source: Path) -> dict[str, str]:
    return {entry.key: entry.value for entry in onnx.load(source, load_external_data=False).metadata_props}


def _write(model: onnx.ModelProto, out: Path, *, metadata: dict[str, str]) -> None:
    onnx.helper.set_model_props(model, metadata)
    onnx.checker.check_model(model)
    out.write_bytes(model.SerializeToString(deterministic=True))


def _notes(given_back: Sequence[Loss], operators: Mapping[str, int], *, ratio: float, name: str) -> list[str]:
    notes: list[str] = []
    if given_back:
        layers = ", ".join(f"{loss.layer} ({loss.error:.2g})" for loss in given_back)
        notes.append(f"{name}: {len(given_back)} layers stay float32 for their error: {layers}")
    if operators.get("Conv", 0) > len(given_back):
        notes.append(f"{name}: {operators['Conv']} convolutions run in float32 on this machine")
    if ratio < SMALLER:
        notes.append(f"{name} is only {ratio:.2f}x smaller than the float graph")
    return notes
