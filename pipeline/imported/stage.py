"""The import stage: a finished `.onnx` -> candidates in our contract, compared with the file as it was given.

Shape legend: N images, K classes.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from pipeline.artifact import StageResult
from pipeline.compression.calibrate import spread
from pipeline.compression.candidates import DENSE, DYNAMIC_OF, PRUNED, STATIC_OF
from pipeline.config import OnnxConfig
from pipeline.data import open_dataset, preprocessing_of
from pipeline.errors import PipelineError
from pipeline.export import MAX_SHOWN, PARITY_BATCHES, Parity, add_static, compare
from pipeline.imported.file import digest_of, files_of, one_line, opset_of, read_whole
from pipeline.imported.reference import (
    Floats,
    Normalisation,
    Reference,
    needs_softmax,
    open_graph,
    open_reference,
    softmax_of,
)
from pipeline.imported.wrap import wrap
from pipeline.loader import Images, open_images
from pipeline.session import probabilities
from pipeline.stage import Context, data_facts

MAX_DIFFERENCE = 1e-3  # of a probability, between the graph as given and as wrapped
HARDLY_BETTER = 1.5  # times the accuracy of guessing
NEED_WEIGHTS = (PRUNED, *DYNAMIC_OF.values(), STATIC_OF[PRUNED])
BATCH = 64


def import_graph(context: Context) -> StageResult:
    """Wrap the recipe's graph, compare it with the file as it is, and quantize it statically."""
    recipe, config = context.recipe, context.recipe.onnx
    assert config is not None
    dataset = open_dataset(recipe.data, cache=context.cache)
    spec = preprocessing_of(recipe.data)
    validation = open_images(dataset.val, spec, cache=context.cache)
    reference = reference_of(config)
    answers_NK = np.concatenate([reference.answers(pixels) for pixels in validation.batches(BATCH)])
    _require_classes(answers_NK, dataset.labels, name=config.file.name)
    softmax = needs_softmax(answers_NK, asked=config.outputs, name=config.file.name)
    graph = wrap(
        read_whole(config.file),
        reference.given,
        normalisation=reference.normalisation,
        softmax=softmax,
        image_HWC=(spec.height, spec.width, spec.channels),
        num_classes=len(dataset.labels),
        metadata={
            "labels": json.dumps(dataset.labels),
            "candidate": DENSE,
            "given_sha256": digest_of(config.file),
        },
    )
    path = context.out / f"{DENSE}.onnx"
    path.write_bytes(graph.SerializeToString(deterministic=True))
    expected_NK = softmax_of(answers_NK) if softmax else answers_NK
    parity = check_wrapped(path, expected_NK, validation, reference=reference)
    top1 = float((expected_NK.argmax(1) == validation.split.labels).mean())
    result = StageResult(
        data=data_facts(dataset, spec),
        models={DENSE: {"outputs": "logits" if softmax else "probabilities", "opset": opset_of(graph)}},
        metrics={
            "given_val_top1": top1,
            "given_bytes": float(sum(file.stat().st_size for file in files_of(config.file))),
            f"{DENSE}_parity_agreement": parity.agreement,
            f"{DENSE}_parity_ties": float(parity.ties),
            f"{DENSE}_onnx_bytes": float(path.stat().st_size),
        },
        report={
            "parity_max_difference": {DENSE: parity.max_difference},
            "notes": [*accuracy_notes(top1, dataset.labels, images=len(validation)), not_applied()],
        },
    )
    if not recipe.static.enabled:
        return result
    training = open_images(dataset.train, spec, cache=context.cache)
    images = training.batch(spread(dataset.train.labels, recipe.static.images))
    return add_static(result, context.out, images, validation, config=recipe.static, bits=config.bits)


def reference_of(config: OnnxConfig) -> Reference:
    """Open the recipe's graph as the user runs it."""
    how = Normalisation(scale=config.scale, mean=config.mean, std=config.std)
    return open_reference(config.file, layout=config.layout, normalisation=how)


def check_wrapped(path: Path, expected_NK: Floats, images: Images, *, reference: Reference) -> Parity:
    """Compare the wrapped graph at batches of 1, 3 and 8 with the given graph's answers; return the worst of the three.

    Raises `PipelineError` when a batch size does not run, or when an image is answered differently.
    """
    name, session = reference.given.path.name, open_graph(path)
    results: list[Parity] = []
    for size in PARITY_BATCHES:
        answers_NK = np.concatenate([_answers(session, p, reference=reference) for p in images.batches(size)])
        parity = compare(expected_NK, answers_NK)
        if parity.disagreements or parity.max_difference > MAX_DIFFERENCE:
            worst = np.argsort(-np.abs(expected_NK - answers_NK).max(axis=1))[:MAX_SHOWN]
            raise PipelineError(
                f"{name}: {size} image(s) at a time, as pixels, get other answers than by the file as it is: "
                f"{parity.disagreements} of {parity.images} have another top-1, probabilities differ by up to "
                f"{parity.max_difference:.1e}; does an answer depend on the images beside it? Worst: "
                + "; ".join(images.split.describe(int(position)) for position in worst),
                exit_status=1,
            )
        results.append(parity)
    return max(results, key=lambda parity: parity.max_difference)


def accuracy_notes(top1: float, labels: Sequence[str], *, images: int) -> list[str]:
    """Return what is to be said about the accuracy of what was given; a warning when it is hardly above guessing."""
    lines = [f"the given graph has a top-1 of {top1:.2%} on {images} validation images"]
    if top1 <= HARDLY_BETTER / len(labels):
        lines.append(
            f"warning: guessing among {len(labels)} classes has {1 / len(labels):.2%}; are the graph's outputs in the "
            f"order of the sorted class folders ({', '.join(labels[:3])}, ...), and onnx.scale, onnx.mean and onnx.std "
            "those that it was trained with?"
        )
    return lines


def not_applied() -> str:
    """Return the line that names the candidates that a graph alone cannot have."""
    return f"not applied: {', '.join(NEED_WEIGHTS)}; they start from PyTorch weights"


def _answers(session: onnxruntime.InferenceSession, pixels_BHWC: NDArray[np.uint8], *, reference: Reference) -> Floats:
    """Return probabilities [B, K]; `PipelineError` when the graph is made for another B."""
    try:
        answers_BK = probabilities(session, pixels_BHWC)
    except Exception as error:  # onnxruntime's exceptions have no common base
        raise _held_batch(reference, len(pixels_BHWC), one_line(error)) from error
    if len(answers_BK) != len(pixels_BHWC):
        raise _held_batch(reference, len(pixels_BHWC), f"it gives {len(answers_BK)} answers")
    return answers_BK


def _held_batch(reference: Reference, size: int, said: str) -> PipelineError:
    fixed = f"is fixed to batches of {reference.given.batch} and " if reference.given.batch else ""
    return PipelineError(
        f"{reference.given.path.name} {fixed}does not run on batches of {size}: {said}; "
        "export it again with a dynamic batch"
    )


def _require_classes(answers_NK: Floats, labels: Sequence[str], *, name: str) -> None:
    if (given := answers_NK.shape[1]) != len(labels):
        raise PipelineError(
            f"{name} tells {given} classes apart, but the data has {len(labels)} ({', '.join(labels[:3])}, ...); "
            "each needs one folder in train/"
        )
