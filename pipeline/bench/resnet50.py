"""`python -m pipeline.bench.resnet50`: what pruning and static int8 gain on a ResNet-50 at 224 pixels, as one table.

Random weights, so speed only: batch 1, one thread, contenders interleaved. Calibrated on photos where there are any.
"""

import argparse
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.compression.bits import weight_bits
from pipeline.compression.calibrate import quantize_static
from pipeline.compression.candidates import DENSE, PRUNED, STATIC_OF, float_of
from pipeline.compression.macs import count_macs
from pipeline.compression.prune import Rule, prune
from pipeline.export import export_onnx
from pipeline.machine import cpu_facts, library_versions
from pipeline.measure import Cost, Ratio, measure_interleaved, ratio
from pipeline.models import ModelSpec, build
from pipeline.session import open_session, probabilities
from serving.worker.preprocess import Preprocessing, decode

PHOTOS = Path(__file__).parents[3] / "shared" / "data" / "photos.tar"
SIZE = 224
ROUNDS = 21
IMAGES = 40
SPEC = ModelSpec(
    name="resnet50",
    num_classes=1000,
    channels=3,
    height=SIZE,
    width=SIZE,
    mean=(0.485, 0.456, 0.406),
    std=(0.229, 0.224, 0.225),
)


@dataclass(frozen=True)
class Row:
    """One graph. The gain is over ORT fp32; `per_mac` is that gain over how many times fewer MACs there are."""

    name: str
    macs: int
    size_bytes: int
    cost_ms: float
    spread_ms: float
    gain: Ratio
    per_mac: float


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print the table as Markdown."""
    parser = argparse.ArgumentParser(prog="python -m pipeline.bench.resnet50", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="interleaved rounds, default: %(default)s")
    parser.add_argument("--photos", type=Path, default=PHOTOS, help="a tar of photos; noise if it is not there")
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    options = parser.parse_args(arguments)
    images = photos(options.photos) if options.photos.is_file() else noise()
    with tempfile.TemporaryDirectory() as folder:
        graphs, macs = make_graphs(Path(folder), images)
        rows = measure(graphs, macs, images[:1], rounds=options.rounds)
    source = f"{len(images)} {'photos' if options.photos.is_file() else 'images of noise'}"
    table = markdown(rows, rounds=options.rounds, source=source)
    if options.out:
        options.out.write_text(table)
    print(table, end="")


def photos(path: Path) -> NDArray[np.uint8]:
    """Return uint8 [N, 224, 224, 3] from a tar of image files, as the worker would decode them."""
    spec = Preprocessing(height=SIZE, width=SIZE, channels=3, resize=256)
    with tarfile.open(path) as tar:
        files = [tar.extractfile(member) for member in tar if member.isfile()]
        return np.stack([decode(file.read(), spec) for file in files[:IMAGES] if file is not None])


def noise() -> NDArray[np.uint8]:
    """Return random pixels uint8 [N, 224, 224, 3]."""
    return np.random.default_rng(0).integers(0, 256, (IMAGES, SIZE, SIZE, 3), dtype=np.uint8)


def make_graphs(folder: Path, images: NDArray[np.uint8]) -> tuple[dict[str, Path], dict[str, int]]:
    """Write the four graphs; return the path and the MACs of each."""
    torch.manual_seed(0)
    dense = build(SPEC).eval()
    models = {DENSE: dense, PRUNED: prune(dense, ratio=0.5, rule=Rule(16, "l2", "uniform")).eval()}
    graphs: dict[str, Path] = {}
    for name, model in models.items():
        graphs[name] = folder / f"{name}.onnx"
        export_onnx(model, graphs[name], opset=20, metadata={})
    for base, name in STATIC_OF.items():
        graphs[name] = folder / f"{name}.onnx"
        quantize_static(
            graphs[base],
            graphs[name],
            images=images,
            validation=lambda size: (images[start : start + size] for start in range(0, len(images), size)),
            labels=np.zeros(len(images), np.int64),
            methods=("minmax",),
            max_loss=100,
            bits=weight_bits("auto"),
        )
    macs = {name: count_macs(model) for name, model in models.items()}
    return graphs, {name: macs[float_of(name)] for name in graphs}


def measure(
    graphs: Mapping[str, Path], macs: Mapping[str, int], image_BHWC: NDArray[np.uint8], *, rounds: int
) -> list[Row]:
    """Return a row for every graph; all answer the same image."""
    sessions = {name: open_session(path) for name, path in graphs.items()}
    calls = {name: partial(probabilities, session, image_BHWC) for name, session in sessions.items()}
    costs = measure_interleaved(calls, rounds=rounds)
    return [row(name, costs, macs, size_bytes=graphs[name].stat().st_size) for name in graphs]


def row(name: str, costs: Mapping[str, Cost], macs: Mapping[str, int], *, size_bytes: int) -> Row:
    """Return what one graph costs, and gains over the dense float32 one."""
    cost, gain = costs[name], ratio(costs[DENSE], costs[name])
    per_mac = gain.median * macs[name] / macs[DENSE]
    return Row(name, macs[name], size_bytes, cost.median_ms, cost.spread_ms, gain, per_mac)


def markdown(rows: Sequence[Row], *, rounds: int, source: str) -> str:
    """Return the table with the conditions under which it was measured."""
    lines = [
        "| ResNet-50, 224 pixels | MACs | MB | CPU ms/image | over ORT fp32 (95 %) | time gained / MACs saved |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for r in rows:
        lines.append(
            f"| {r.name} | {r.macs / 1e9:.2f} G | {r.size_bytes / 1e6:.1f} | {r.cost_ms:.1f} ± {r.spread_ms:.1f} "
            f"| {r.gain.median:.2f}x ({r.gain.low:.2f}-{r.gain.high:.2f}) | {r.per_mac:.2f} |"
        )
    cpu, versions = cpu_facts(), library_versions()
    lines += [
        "",
        f"Random weights; pruned: half of the channels, in multiples of 16; static int8 calibrated on {source}. "
        f"n = {rounds} interleaved rounds, median ± quartile distance, CPU time, batch 1, one thread. "
        f"{datetime.now(UTC):%Y-%m-%d}, {cpu['name']} ({', '.join(cpu['flags'])}), {weight_bits('auto')}-bit weights, "
        f"torch {versions['torch']}, onnxruntime {versions['onnxruntime']}. `python -m pipeline.bench.resnet50`",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
