"""`python -m pipeline.bench.dynamic`: row-wise int8 against ONNX Runtime's own dynamic quantization, as one table.

ViT-B/16 at 224 pixels and a 768-3072-768 MLP of 197 rows, random weights, batches of 1 and 8, one thread.
"""

import argparse
import copy
import logging
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from numpy.typing import NDArray
from torch import nn

from pipeline.compression.bits import weight_bits
from pipeline.compression.layers import quantize_layers
from pipeline.machine import cpu_facts, library_versions
from pipeline.measure import Ratio, measure_interleaved, ratio
from pipeline.session import open_session

BATCHES = (1, 8)
ROUNDS = 9
FP32, OURS = "ORT fp32", "row-wise int8"
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Row:
    """One contender at one batch size."""

    model: str
    batch: int
    name: str
    cost_ms: float  # CPU milliseconds of a call
    spread_ms: float  # between the quartiles
    gain: Ratio  # over ORT fp32
    error: float  # largest difference from ORT fp32, of any output
    moved: float  # by how much an input's own answer changes with its batch-mates


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print the table as Markdown."""
    parser = argparse.ArgumentParser(prog="python -m pipeline.bench.dynamic", description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="interleaved rounds, default: %(default)s")
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    options = parser.parse_args(arguments)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.models.split(","):
            rows += measure_model(name, Path(folder), rounds=options.rounds)
    table = markdown(rows, rounds=options.rounds)
    if options.out:
        options.out.write_text(table)
    print(table, end="")


def vit() -> tuple[nn.Module, tuple[int, ...]]:
    """Return torchvision's ViT-B/16, as it initialises itself, and the shape of one input."""
    from torchvision import models

    net = models.vit_b_16(weights=None)
    nn.init.trunc_normal_(net.heads.head.weight, std=0.02)  # torchvision's zeros would make every answer equal
    return net, (3, 224, 224)


def mlp() -> tuple[nn.Module, tuple[int, ...]]:
    """Return the MLP of a ViT-B block, and the shape of one input."""
    return nn.Sequential(nn.Linear(768, 3072), nn.GELU(), nn.Linear(3072, 768)), (197, 768)


MODELS = {"vit_b_16": vit, "mlp": mlp}


def measure_model(name: str, folder: Path, *, rounds: int) -> list[Row]:
    """Return the rows of one network: every contender answers the same inputs, interleaved, with one thread."""
    torch.manual_seed(0)
    net, shape = MODELS[name]()
    generator = np.random.default_rng(0)
    inputs = generator.standard_normal((max(BATCHES), *shape)).astype(np.float32)
    graphs = make_graphs(net.eval(), shape, folder / name)
    sessions = {key: open_session(path) for key, path in graphs.items()}
    answers = {key: _run(session, inputs) for key, session in sessions.items()}
    moved = {key: moved_by_others(session, inputs) for key, session in sessions.items()}
    rows: list[Row] = []
    for batch in BATCHES:
        costs = measure_interleaved(
            {key: partial(_run, session, inputs[:batch]) for key, session in sessions.items()}, rounds=rounds
        )
        for key, cost in costs.items():
            rows.append(
                Row(
                    model=name,
                    batch=batch,
                    name=key,
                    cost_ms=cost.median_ms,
                    spread_ms=cost.spread_ms,
                    gain=ratio(costs[FP32], cost),
                    error=float(np.abs(answers[key] - answers[FP32]).max()),
                    moved=moved[key],
                )
            )
    return rows


def make_graphs(net: nn.Module, shape: tuple[int, ...], stem: Path) -> dict[str, Path]:
    """Write the network as each contender runs it; return name -> path."""
    paths = {key: stem.with_name(f"{stem.name}-{place}.onnx") for place, key in enumerate(_names())}
    export(net, shape, paths[FP32])
    for key, options in _quantizers().items():
        quantize_in_ort(paths[FP32], paths[key], options)
    int8 = copy.deepcopy(net)
    linears = [name for name, module in net.named_modules() if type(module) is nn.Linear]
    attention = [name for name, module in net.named_modules() if isinstance(module, nn.MultiheadAttention)]
    names = linears + [f"{name}.{part}" for name in attention for part in ("in_proj", "out_proj")]
    quantize_layers(int8, dict.fromkeys(names, weight_bits("auto")))
    export(int8, shape, paths[OURS])
    return paths


def _quantizers() -> dict[str, dict[str, bool]]:
    """Return the ways to call `quantize_dynamic`: as it is meant for this CPU, and without any option."""
    meant = {"per_channel": True, "reduce_range": weight_bits("auto") == 7}
    return {f"ORT quantize_dynamic ({', '.join(k for k, v in meant.items() if v)})": meant, "the same, no option": {}}


def _names() -> list[str]:
    return [FP32, *_quantizers(), OURS]


def export(net: nn.Module, shape: tuple[int, ...], path: Path) -> None:
    """Write the network with input `x`, output `y` and a dynamic batch."""
    torch.onnx.export(
        net.eval(), (torch.zeros(2, *shape),), path, dynamo=True, input_names=["x"], output_names=["y"],
        dynamic_shapes=({0: torch.export.Dim("batch")},), opset_version=20, external_data=False, verbose=False,
    )  # fmt: skip


def quantize_in_ort(source: Path, target: Path, options: dict[str, bool]) -> None:
    """Quantize a graph with ONNX Runtime's own function."""
    from onnxruntime.quantization import quantize_dynamic

    graph = onnx.load(source)
    del graph.graph.value_info[:]  # it fails on the exporter's shapes
    logger = logging.getLogger()
    level = logger.level
    logger.setLevel(logging.ERROR)  # it recommends a step for convolutional networks
    try:
        quantize_dynamic(graph, target, **options)
    finally:
        logger.setLevel(level)


def moved_by_others(session: onnxruntime.InferenceSession, inputs: Floats) -> float:
    """Return by how much the first answer changes with the batch: its size, and zeros, others or huge ones in it."""
    alone = _run(session, inputs[:1])[0]
    batches = [np.concatenate([inputs[:1], factor * inputs[1:size]]) for size in (2, 3, 8) for factor in (0, 1, 100)]
    return max(float(np.abs(_run(session, batch.astype(np.float32))[0] - alone).max()) for batch in batches)


def _run(session: onnxruntime.InferenceSession, inputs: Floats) -> Floats:
    answers: Floats = session.run(["y"], {"x": inputs})[0]
    return answers


def markdown(rows: Sequence[Row], *, rounds: int) -> str:
    """Return the table with the conditions under which it was measured."""
    lines = [
        "| model | batch | variant | CPU ms | over ORT fp32 (95 %) | error | changes with batch-mates |",
        "|---|---:|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        gain = f"{row.gain.median:.2f}x ({row.gain.low:.2f}-{row.gain.high:.2f})"
        moved = f"yes ({row.moved:.2g})" if row.moved else "no (0)"
        lines.append(
            f"| {row.model} | {row.batch} | {row.name} | {row.cost_ms:.1f} ± {row.spread_ms:.1f} | {gain} "
            f"| {row.error:.2g} | {moved} |"
        )
    cpu, versions = cpu_facts(), library_versions()
    lines += [
        "",
        f"Random weights and inputs; n = {rounds} interleaved rounds, median ± quartile distance, CPU time, one "
        f"thread; error = largest difference from ORT fp32 over {max(BATCHES)} inputs. "
        f"{datetime.now(UTC):%Y-%m-%d}, {cpu['name']} ({', '.join(cpu['flags'])}), {weight_bits('auto')}-bit weights, "
        f"torch {versions['torch']}, onnxruntime {versions['onnxruntime']}. `python -m pipeline.bench.dynamic`",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
