"""`make bench`: accuracy, bytes and CPU time of the shipped model, ORT fp32 and what the user began with."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray

from pipeline.artifact import Artifact
from pipeline.compression.candidates import DENSE
from pipeline.compression.rebuild import load_model
from pipeline.config import OnnxConfig, Recipe
from pipeline.export import Floats
from pipeline.imported.stage import reference_of
from pipeline.loader import Images
from pipeline.machine import cpu_facts, library_versions
from pipeline.measure import measure_interleaved, ratio
from pipeline.session import open_session, probabilities
from pipeline.verify import in_batches, torch_answer
from serving.worker.preprocess import decode

ROUNDS = 21


@dataclass(frozen=True)
class Contender:
    """What answers uint8 [B, H, W, C] with float32 [B, K], and the bytes of what it is kept in."""

    name: str
    answer: Callable[[NDArray[np.uint8]], Floats]
    size_bytes: int


@dataclass(frozen=True)
class Row:
    """One contender. Ratios are shipped against it: above 1 the shipped model is cheaper."""

    name: str
    top1: float
    images: int
    size_bytes: int
    cost_ms: float  # CPU milliseconds for one image, one thread, batch 1
    spread_ms: float  # between the quartiles
    shipped_speedup: float
    shipped_speedup_low: float
    shipped_speedup_high: float


def bench(recipe: Recipe, made: dict[str, Artifact], images: Images, *, root: Path) -> Path:
    """Measure on the test split, write report.json and summary.md, and return the path of the Markdown."""
    (chosen,) = made["choose"].manifest.models
    shipped, fp32 = made["choose"].file("model.onnx"), (made.get("export") or made["import"]).file("fp32.onnx")
    begun = given_graph(recipe.onnx, made["import"]) if recipe.onnx else eager_model(made["train"])
    rows = measure_rows(f"shipped ({chosen})", shipped, fp32, begun, images)
    report = {
        "schema": 1,
        "recipe": recipe.package.name,
        "shipped": chosen,
        "rows": [asdict(row) for row in rows],
        "archive_bytes": int(made["package"].manifest.metrics["mar_bytes"]),
        "decode_ms": decode_cost(images),
        "conditions": conditions(),
    }
    out = root / "bench" / made["package"].path.name
    out.mkdir(parents=True, exist_ok=True)
    (out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    summary = out / "summary.md"
    summary.write_text(markdown(report))
    return summary


def measure_rows(name: str, shipped: Path, fp32: Path, begun: Contender, images: Images) -> list[Row]:
    """Return the three rows: all contenders answer the same image, interleaved, with one thread each."""
    contenders = [onnx_graph(name, shipped), onnx_graph("ORT fp32", fp32), begun]
    one = images.batch(np.arange(1))
    costs = measure_interleaved({c.name: partial(c.answer, one) for c in contenders}, rounds=ROUNDS)
    rows: list[Row] = []
    for contender in contenders:
        cost = costs[contender.name]
        gain = ratio(cost, costs[name])
        top1 = float((in_batches(images, contender.answer).argmax(1) == images.split.labels).mean())
        spent = (cost.median_ms, cost.spread_ms, gain.median, gain.low, gain.high)
        rows.append(Row(contender.name, top1, len(images), contender.size_bytes, *spent))
    return rows


def onnx_graph(name: str, path: Path) -> Contender:
    """Return a graph in our contract."""
    return Contender(name, partial(probabilities, open_session(path)), path.stat().st_size)


def eager_model(train: Artifact) -> Contender:
    """Return the dense network as PyTorch runs it without us, on one thread."""
    torch.set_num_threads(1)
    answer = torch_answer(load_model(train, "dense"))
    return Contender("PyTorch eager fp32", answer, train.file("dense.safetensors").stat().st_size)


def given_graph(config: OnnxConfig, imported: Artifact) -> Contender:
    """Return the user's file as it runs without us: preprocessing in numpy, one image at a time."""
    softmax = imported.manifest.models[DENSE]["outputs"] == "logits"
    answer = partial(reference_of(config).probabilities, softmax=softmax)
    return Contender(f"{config.file.name} as given", answer, int(imported.manifest.metrics["given_bytes"]))


def decode_cost(images: Images) -> float:
    """Return the CPU milliseconds of decoding one encoded test image to the model's size."""
    encoded = images.split.encoded(0)

    def call() -> NDArray[np.uint8]:
        return decode(encoded, images.spec)

    return measure_interleaved({"decode": call}, rounds=ROUNDS)["decode"].median_ms


def conditions() -> dict[str, Any]:
    """Return under what conditions the figures were taken."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "cpu": cpu_facts(),
        "cpus": os.cpu_count(),
        "onnxruntime": onnxruntime.__version__,
        "versions": library_versions(),
        "rounds": ROUNDS,
        "clock": "process CPU time, one thread, batch 1, contenders interleaved in random order, warm-up excluded",
    }


def markdown(report: dict[str, Any]) -> str:
    """Return the report as a Markdown table with its conditions."""
    where = report["conditions"]
    rows: Sequence[dict[str, Any]] = report["rows"]
    lines = [
        f"### {report['recipe']}: ships {report['shipped']}",
        "",
        "| model | top-1 (test) | CPU ms/image | shipped is cheaper by (95 %) | kB |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        gain = f"{row['shipped_speedup']:.2f}x ({row['shipped_speedup_low']:.2f}-{row['shipped_speedup_high']:.2f})"
        cost = f"{row['cost_ms']:.3f} ± {row['spread_ms']:.3f}"
        lines.append(f"| {row['name']} | {row['top1']:.2%} | {cost} | {gain} | {row['size_bytes'] / 1000:,.0f} |")
    lines += [
        "",
        f"Archive {report['archive_bytes'] / 1000:,.0f} kB; decoding adds {report['decode_ms']:.3f} CPU ms per image. "
        f"n = {rows[0]['images']} test images; {where['rounds']} rounds, median ± quartile distance; {where['clock']}. "
        f"{where['date']}, {where['cpu']['name']} ({', '.join(where['cpu']['flags'])}), "
        f"torch {where['versions']['torch']}, onnxruntime {where['onnxruntime']}.",
    ]
    return "\n".join(lines) + "\n"
