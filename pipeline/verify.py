"""Compare every hand-over on the whole test split: PyTorch dense -> compressed -> ONNX -> answers over HTTP.

Of a recipe that names an ONNX file: the file as it was given -> in our contract -> quantized -> answers over HTTP.

Shape legend: N images, B batch, K classes.
"""

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from pipeline.artifact import Artifact, sha256_file
from pipeline.compression.candidates import DENSE, STATIC_OF, float_of
from pipeline.compression.rebuild import load_model
from pipeline.config import OnnxConfig, Recipe
from pipeline.data import Ints, Split
from pipeline.errors import PipelineError
from pipeline.export import Floats, Served, compare
from pipeline.imported.stage import reference_of
from pipeline.loader import Images
from pipeline.models import Classifier
from pipeline.session import open_session, probabilities
from serving.client import Client

CLIENTS = 32
BATCH = 64
SAME = 1e-6  # a probability over HTTP is the offline one, printed and read back
GPU = 2e-2  # there, sums are made in another order for another number of batch-mates


@dataclass(frozen=True)
class Handover:
    """One row: what answered, and how it compares with what it was made from."""

    name: str
    probabilities: Floats  # [N, K]
    min_agreement: float  # with the row above, ties aside
    max_difference: float  # of a probability from the row above


@dataclass(frozen=True)
class Verdict:
    """A hand-over with its figures, and the breach if there is one."""

    name: str
    top1: float
    agreement: float | None
    difference: float | None
    breach: str | None


def verify(recipe: Recipe, made: dict[str, Artifact], images: Images, *, url: str) -> list[Verdict]:
    """Ask everything that was made on the way for its answers to `images`; return a verdict for every hand-over."""
    (chosen,) = made["choose"].manifest.models
    rows = (
        _trained(made, images, chosen) if recipe.onnx is None else _given(recipe.onnx, made["import"], images, chosen)
    )
    graph, provider = made["choose"].file("model.onnx"), recipe.export.provider
    answers = onnx_answers(graph, images, provider=provider)
    rows.append(handover_to_onnx(chosen, answers, min_agreement=recipe.export.min_agreement, provider=provider))
    served = served_answers(images.split, url=url, model=recipe.package.name, digest=sha256_file(graph))
    rows.append(Handover("HTTP", served, *((1.0, SAME) if provider == "cpu" else (recipe.export.min_agreement, GPU))))
    return judge(rows, images.split.labels, budget=recipe.choose.budget)


def handover_to_onnx(chosen: str, answers_NK: Floats, *, min_agreement: float, provider: str = "cpu") -> Handover:
    """Return the graph's row. Its promise depends on what the row above is: the same network, or the same in float."""
    if chosen in STATIC_OF.values():  # quantized in ONNX, so the budget against dense is what was promised
        return Handover(f"ONNX {chosen}", answers_NK, 0, 1)
    exact = chosen == float_of(chosen) and provider == "cpu"  # a GPU rounds float32 products to TF32
    agreement, difference = (1.0, 1e-3) if exact else (min_agreement, 1.0)
    return Handover(f"ONNX {chosen}", answers_NK, agreement, difference)


def _trained(made: dict[str, Artifact], images: Images, chosen: str) -> list[Handover]:
    """Return what PyTorch answers: dense, pruned, and in int8 where PyTorch made that."""
    rows = [Handover("PyTorch dense", torch_answers(load_model(made["train"], "dense"), images), 0, 1)]
    for name in dict.fromkeys((float_of(chosen), chosen)):
        if name != DENSE and name in made["compress"].manifest.models:
            rows.append(Handover(f"PyTorch {name}", torch_answers(load_model(made["compress"], name), images), 0, 1))
    return rows


def _given(config: OnnxConfig, imported: Artifact, images: Images, chosen: str) -> list[Handover]:
    """Return what the user's file answers, and what it answers in our contract where something else ships."""
    softmax = imported.manifest.models[DENSE]["outputs"] == "logits"
    answer = partial(reference_of(config).probabilities, softmax=softmax)
    rows = [Handover(config.file.name, in_batches(images, answer), 0, 1)]
    if chosen != DENSE:
        answers = onnx_answers(imported.file(f"{DENSE}.onnx"), images)
        rows.append(Handover(f"ONNX {DENSE}", answers, 1.0, 1e-3))
    return rows


def judge(rows: Sequence[Handover], labels_N: Ints, *, budget: float) -> list[Verdict]:
    """Return a verdict for each row; `budget` is how many points of top-1 may be lost against the first one."""

    def top1(row: Handover) -> float:
        return float((row.probabilities.argmax(1) == labels_N).mean())

    dense = top1(rows[0])
    verdicts = [Verdict(rows[0].name, dense, None, None, None)]
    for before, row in pairwise(rows):
        parity = compare(before.probabilities, row.probabilities)
        lost = (dense - top1(row)) * 100
        breach = None
        if parity.agreement < row.min_agreement:
            breach = f"agrees on {parity.agreement:.2%}, {row.min_agreement:.2%} are promised"
        elif parity.max_difference > row.max_difference:
            breach = f"differs by {parity.max_difference:.1e}, at most {row.max_difference:.0e} is promised"
        elif lost > budget + 1e-9:
            breach = f"lost {lost:.2f} points against dense, at most {budget:g} are promised"
        verdicts.append(Verdict(row.name, top1(row), parity.agreement, parity.max_difference, breach))
    return verdicts


def torch_answers(model: Classifier, images: Images) -> Floats:
    """Return probabilities float32 [N, K] from PyTorch."""
    return in_batches(images, torch_answer(model))


def torch_answer(model: Classifier) -> Callable[[NDArray[np.uint8]], Floats]:
    """Return the function that answers a batch of pixels with PyTorch."""
    served = Served(model).eval()

    def answer(pixels: NDArray[np.uint8]) -> Floats:
        with torch.no_grad():
            return np.asarray(served(torch.from_numpy(pixels)), np.float32)

    return answer


def onnx_answers(graph: Path, images: Images, *, provider: str = "cpu") -> Floats:
    """Return probabilities float32 [N, K] from ONNX Runtime."""
    return in_batches(images, partial(probabilities, open_session(graph, provider=provider)))


def in_batches(images: Images, answer: Callable[[NDArray[np.uint8]], Floats]) -> Floats:
    """Return `answer` over all images, a batch at a time."""
    return np.concatenate([answer(pixels) for pixels in images.batches(BATCH)])


def served_answers(split: Split, *, url: str, model: str, digest: str) -> Floats:
    """Send every image, as its encoded bytes, and return probabilities float32 [N, K].

    Raises `PipelineError` when the endpoint serves another model than the one with this digest.
    """
    with Client(url, model=model) as client, ThreadPoolExecutor(CLIENTS) as pool:
        answers = list(pool.map(lambda p: client.predict(split.encoded(p), top_k=1_000_000), range(len(split))))
    if answers[0].digest != digest:
        raise PipelineError(
            f"{url} serves a model with digest {answers[0].digest[:12]}, not {digest[:12]}; run make stop serve"
        )
    rows = [[c.probability for c in sorted(answer.predictions, key=lambda c: c.index)] for answer in answers]
    return np.array(rows, np.float32)


def print_verdicts(verdicts: Sequence[Verdict], *, count: int) -> None:
    """Print the table of hand-overs to stderr."""
    table = Table(title=f"Hand-overs on {count} test images", title_justify="left")
    for heading in ("answers from", "top-1", "agreement", "largest difference", ""):
        table.add_column(heading, justify="left" if heading in ("answers from", "") else "right")
    for v in verdicts:
        table.add_row(
            v.name,
            f"{v.top1:.2%}",
            "" if v.agreement is None else f"{v.agreement:.2%}",
            "" if v.difference is None else f"{v.difference:.1e}",
            v.breach or "ok",
        )
    Console(file=sys.stderr).print(table)
