"""PyTorch -> ONNX, parity and static int8: what is exported is what was trained, or the stage fails.

The graph takes pixels (uint8 [B, H, W, C], what `decode` gives) and returns probabilities (float32 [B, K]);
normalisation and softmax are inside. Shape legend: B batch, H height, W width, C channels, K classes, N images.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import onnxruntime
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pipeline.artifact import Artifact, StageResult
from pipeline.compression.bits import weight_bits
from pipeline.compression.calibrate import quantize_static, spread
from pipeline.compression.candidates import FORMS, HALF_OF, STATIC_OF, float_of
from pipeline.compression.half import in_half
from pipeline.compression.rebuild import load_model
from pipeline.config import ExportConfig, StaticConfig
from pipeline.data import open_dataset, preprocessing_of
from pipeline.errors import PipelineError
from pipeline.loader import Images, open_images
from pipeline.models import Classifier
from pipeline.session import open_session, probabilities
from pipeline.stage import Context, data_facts

PARITY_BATCHES = (1, 3, 8)
TIE_MARGIN = 1e-4  # top-2 margin under which fp32 may order two classes either way
MAX_SHOWN = 5

Floats = NDArray[np.float32]


class Served(nn.Module):
    """A classifier that answers in probabilities."""

    def __init__(self, model: Classifier) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        """Return probabilities [B, K]; the softmax subtracts the largest logit, so no finite logit overflows it."""
        return torch.softmax(self.model(images), dim=-1)


@dataclass(frozen=True)
class Parity:
    """How two sets of probabilities for the same images differ."""

    images: int
    disagreements: int  # another top-1, where the reference's top-2 margin exceeds `TIE_MARGIN`
    ties: int  # another top-1 within the margin
    max_difference: float  # of a probability
    worst: tuple[int, ...]  # positions of the disagreements with the largest differences

    @property
    def agreement(self) -> float:
        """Return the share of images with the same top-1, ties included, in [0, 1]."""
        return 1 - self.disagreements / self.images


def export(context: Context) -> StageResult:
    """Export every candidate, compare it with its PyTorch original on the whole validation split, and add static int8.

    A graph that cannot be quantized statically is left out, and the report's notes say why.
    """
    recipe, source = context.recipe, context.parent
    dataset = open_dataset(recipe.data, cache=context.cache)
    spec = preprocessing_of(recipe.data)
    validation = open_images(dataset.val, spec, cache=context.cache)
    metrics: dict[str, float] = {}
    differences: dict[str, float] = {}
    for name in source.manifest.models:
        model = load_model(source, name)
        path = context.out / f"{name}.onnx"
        metadata = origin_of(name, source, weights=name, labels=dataset.labels)
        if model.spec.int8:
            metadata |= {
                "weight_bits": str(max(model.spec.int8.values())),
                "cpu": source.manifest.config["cpu"]["name"],  # of the machine for which they were chosen
            }
        export_onnx(model, path, opset=recipe.export.opset, metadata=metadata)
        required = recipe.export.min_agreement if model.spec.int8 else 1.0
        worst = check_parity(model, path, validation, min_agreement=required, name=name)
        metrics[f"{name}_parity_agreement"] = worst.agreement
        differences[name] = worst.max_difference  # of one CPU's arithmetic, so not a fact of the artifact
        metrics[f"{name}_parity_ties"] = float(worst.ties)
        metrics[f"{name}_onnx_bytes"] = float(path.stat().st_size)
    result = StageResult(
        data=data_facts(dataset, spec),
        models=source.manifest.models,
        metrics=metrics,
        report={"parity_max_difference": differences},
    )
    if HALF_OF in FORMS[recipe.export.provider]:
        result = add_half(result, context.out, source, validation, labels=dataset.labels, config=recipe.export)
    if not recipe.static.enabled or STATIC_OF not in FORMS[recipe.export.provider]:
        return result
    training = open_images(dataset.train, spec, cache=context.cache)
    images = training.batch(spread(dataset.train.labels, recipe.static.images))
    bits = recipe.compress.quantize.bits
    return add_static(result, context.out, images, validation, config=recipe.static, bits=bits)


def origin_of(name: str, source: Artifact, *, weights: str, labels: Sequence[str]) -> dict[str, str]:
    """Return what the graph of candidate `name` says of itself: whose weights it holds, and from which artifacts."""
    return {
        "labels": json.dumps(labels),
        "candidate": name,
        "compress_key": source.manifest.key,
        "train_key": source.manifest.parent or "",
        "weights_sha256": source.manifest.files[f"{weights}.safetensors"],
    }


def add_half(
    result: StageResult,
    out: Path,
    source: Artifact,
    validation: Images,
    *,
    labels: Sequence[str],
    config: ExportConfig,
) -> StageResult:
    """Write the float16 form of every float model and add it to the result; a note says what was not made.

    Its answers, by the provider that will serve them, are compared with those of float32 PyTorch.
    """
    made: dict[str, float] = {}
    notes: list[str] = list(result.report.get("notes", []))
    for base, name in HALF_OF.items():
        if base not in result.models:
            continue
        model, path = load_model(source, base), out / f"{name}.onnx"
        try:
            metadata = origin_of(name, source, weights=base, labels=labels)
            export_onnx(in_half(model), path, opset=config.opset, metadata=metadata)
            required, provider = config.min_agreement, config.provider
            worst = check_parity(model, path, validation, min_agreement=required, name=name, provider=provider)
        except PipelineError as error:
            path.unlink(missing_ok=True)
            notes.append(f"there is no candidate {name}: {error}")
            continue
        made[name] = worst.agreement
    return replace(
        result,
        models=result.models | {name: result.models[float_of(name)] for name in made},
        metrics=result.metrics
        | {f"{name}_parity_agreement": agreement for name, agreement in made.items()}
        | {f"{name}_onnx_bytes": float((out / f"{name}.onnx").stat().st_size) for name in made},
        report=result.report | {"notes": notes},
    )


def add_static(
    result: StageResult, out: Path, images: NDArray[np.uint8], validation: Images, *, config: StaticConfig, bits: str
) -> StageResult:
    """Quantize the float graphs in `out` statically and add what was made to the result; a note says what was not."""
    flags: dict[str, dict[str, str]] = {}
    reports: dict[str, Any] = {}
    metrics: dict[str, float] = {}
    notes: list[str] = list(result.report.get("notes", []))
    for base, name in STATIC_OF.items():
        if base not in result.models:
            continue
        try:
            static = quantize_static(
                out / f"{base}.onnx",
                out / f"{name}.onnx",
                images=images,
                validation=validation.batches,
                labels=validation.split.labels,
                methods=config.methods,
                max_loss=config.max_loss,
                bits=weight_bits(bits),
                metadata={"candidate": name},
            )
        except PipelineError as error:
            notes.append(f"there is no candidate {name}: {error}")
            continue
        flags[name] = static.facts
        reports[name] = asdict(static)
        metrics[f"{name}_agreement"] = static.trial.agreement
        metrics[f"{name}_onnx_bytes"] = float((out / f"{name}.onnx").stat().st_size)
        notes += static.notes
    return replace(
        result,
        data=result.data | {"static": flags},
        models=result.models | {name: result.models[float_of(name)] for name in flags},
        metrics=result.metrics | metrics,
        report=result.report | {"static": reports, "notes": notes},
    )


def export_onnx(model: Classifier, path: Path, *, opset: int, metadata: dict[str, str]) -> None:
    """Write one self-contained ONNX file with input `images`, output `probabilities` and a dynamic batch.

    The model is exported in inference mode, whatever mode the caller left it in, and gets that mode back.
    Raises `PipelineError` when a BatchNorm has no running statistics (its answers depend on batch-mates), when a
    weight is not finite, or when the exporter refuses the network.
    """
    _require_exportable(model)
    spec, training = model.spec, model.training
    example = torch.zeros(2, spec.height, spec.width, spec.channels, dtype=torch.uint8)  # a batch of 1 is specialised
    served = Served(model).eval()
    try:
        program = torch.onnx.export(
            served,
            (example,),
            dynamo=True,
            input_names=["images"],
            output_names=["probabilities"],
            dynamic_shapes={"images": {0: torch.export.Dim("batch")}},
            opset_version=opset,
            verbose=False,
        )
    except (torch.onnx.OnnxExporterError, torch._dynamo.exc.TorchDynamoException) as error:
        raise PipelineError(f"{spec.name} cannot be exported: {_reason(error)}", exit_status=1) from error
    finally:
        model.train(training)
    assert program is not None
    graph = program.model_proto
    onnx.helper.set_model_props(graph, metadata | {"quartet": "1"})
    if (found := next(o.version for o in graph.opset_import if o.domain == "")) != opset:
        raise PipelineError(f"{spec.name} was exported with opset {found}, not export.opset = {opset}; use {found}")
    onnx.checker.check_model(graph)
    path.write_bytes(graph.SerializeToString(deterministic=True))  # weights inside: a sidecar would not be packed


def check_parity(
    model: Classifier, path: Path, images: Images, *, min_agreement: float, name: str, provider: str = "cpu"
) -> Parity:
    """Compare PyTorch and ONNX Runtime on every image at batches of 1, 3 and 8; return the worst of the three.

    Raises `PipelineError` that names the images which differ most when fewer than `min_agreement` have the same top-1.
    """
    session = open_session(path, provider=provider)
    results: list[Parity] = []
    for size in PARITY_BATCHES:
        with _one_thread():
            pairs = [_both(model, session, pixels) for pixels in images.batches(size)]
        reference, answers = (np.concatenate(side) for side in zip(*pairs, strict=True))
        results.append(compare(reference, answers))
    worst = min(results, key=lambda parity: (parity.agreement, -parity.max_difference))
    if worst.agreement < min_agreement:
        shown = "; ".join(images.split.describe(position) for position in worst.worst)
        raise PipelineError(
            f"candidate {name}: the ONNX graph agrees with PyTorch on {worst.agreement:.2%} of {worst.images} "
            f"validation images, {min_agreement:.2%} are required. Worst: {shown}",
            exit_status=1,
        )
    return worst


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let PyTorch answer with one thread: for a few images at a time, several would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def compare(reference_NK: Floats, answers_NK: Floats) -> Parity:
    """Count where the top-1 differs; a non-finite answer is a disagreement."""
    if reference_NK.shape[1] > 1:
        second, first = np.partition(reference_NK, -2, axis=1)[:, -2:].T
    else:
        first, second = reference_NK[:, 0], np.zeros(len(reference_NK), np.float32)
    finite = np.isfinite(answers_NK).all(axis=1)
    differs = (reference_NK.argmax(1) != answers_NK.argmax(1)) | ~finite
    tie = differs & finite & (first - second <= TIE_MARGIN)
    distance = np.nan_to_num(np.abs(reference_NK - answers_NK).max(axis=1), nan=1.0, posinf=1.0)
    wrong = np.flatnonzero(differs & ~tie)
    return Parity(
        images=len(reference_NK),
        disagreements=len(wrong),
        ties=int(tie.sum()),
        max_difference=float(distance.max()),
        worst=tuple(wrong[np.argsort(-distance[wrong])][:MAX_SHOWN].tolist()),
    )


def _both(
    model: Classifier, session: onnxruntime.InferenceSession, pixels_BHWC: NDArray[np.uint8]
) -> tuple[Floats, Floats]:
    with torch.no_grad():
        reference = Served(model).eval()(torch.from_numpy(pixels_BHWC)).numpy()
    return cast(Floats, reference), probabilities(session, pixels_BHWC)


def _require_exportable(model: Classifier) -> None:
    for name, module in model.net.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None:
            raise PipelineError(
                f"layer {name} of {model.spec.name} is a BatchNorm without running statistics: an image's answer would "
                "depend on its batch-mates; use track_running_stats=True"
            )
    for name, tensor in model.net.state_dict().items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise PipelineError(f"{name} of {model.spec.name} is not finite; the training has diverged", exit_status=1)


def _reason(error: BaseException) -> str:
    cause = error.__cause__ or error
    return " ".join(str(cause).split())[:300]
