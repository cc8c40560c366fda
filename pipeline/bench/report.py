"""`make bench`: accuracy, bytes and CPU time of the shipped model, ORT fp32 and PyTorch eager, as JSON and Markdown."""

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
from pipeline.compression.rebuild import load_model
from pipeline.config import Recipe
from pipeline.export import Floats, Served
from pipeline.loader import Images
from pipeline.machine import cpu_facts, library_versions
from pipeline.measure import measure_interleaved, ratio
from pipeline.session import open_session, probabilities
from pipeline.verify import in_batches, torch_answers
from serving.worker.preprocess import decode

ROUNDS = 21


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
    shipped, fp32 = made["choose"].file("model.onnx"), made["export"].file("fp32.onnx")
    rows = measure_rows(f"shipped ({chosen})", shipped, fp32, made["train"], images)
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


def measure_rows(name: str, shipped: Path, fp32: Path, train: Artifact, images: Images) -> list[Row]:
    """Return the three rows: all contenders answer the same image, interleaved, with one thread each."""
    torch.set_num_threads(1)
    eager = load_model(train, "dense")
    served = Served(eager).eval()
    one = images.batch(np.arange(1))
    sessions = {name: open_session(shipped), "ORT fp32": open_session(fp32)}

    def run_eager() -> None:
        with torch.no_grad():
            served(torch.from_numpy(one))

    calls: dict[str, Callable[[], object]] = {
        key: partial(probabilities, session, one) for key, session in sessions.items()
    }
    costs = measure_interleaved(calls | {"PyTorch eager fp32": run_eager}, rounds=ROUNDS)
    answers: dict[str, Floats] = {
        key: in_batches(images, partial(probabilities, session)) for key, session in sessions.items()
    }
    answers["PyTorch eager fp32"] = torch_answers(eager, images)
    sizes = {name: shipped, "ORT fp32": fp32, "PyTorch eager fp32": train.file("dense.safetensors")}
    rows: list[Row] = []
    for key, cost in costs.items():
        gain = ratio(cost, costs[name])
        top1 = float((answers[key].argmax(1) == images.split.labels).mean())
        size = sizes[key].stat().st_size
        rows.append(Row(key, top1, len(images), size, cost.median_ms, cost.spread_ms, gain.median, gain.low, gain.high))
    return rows


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
