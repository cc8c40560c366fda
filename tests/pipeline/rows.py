"""Rows of the table of candidates, and the report of the choose stage made from them."""

from typing import Any

from pipeline.choose import decide, report_of
from pipeline.config import ChooseConfig
from pipeline.evaluate import Candidate, Comparison, Measured

TEST = Comparison(
    images=200,
    dense_top1=0.98,
    top1=0.97,
    won=1,
    lost=3,
    difference=-1.0,
    difference_low=-3.1,
    difference_high=1.0,
)


def row(
    name: str,
    top1: float,
    speedup: float,
    *,
    size_bytes: int = 1000,
    low: float | None = None,
    high: float | None = None,
) -> Candidate:
    """Return a candidate whose interval, unless given, is one point; fp32 takes 1 ms."""
    return Candidate(
        name=name,
        val_top1=top1,
        val_images=100,
        size_bytes=size_bytes,
        parameters=250,
        nonzero_parameters=240,
        cost_ms=1 / speedup,
        cost_spread_ms=0.01,
        speedup=speedup,
        speedup_low=speedup if low is None else low,
        speedup_high=speedup if high is None else high,
        first_call_ms=1.5,
    )


DENSE = row("fp32", 0.990, 1.0)
SIX = (
    DENSE,
    row("dynamic", 0.990, 0.91, low=0.90, high=0.92),
    row("static", 0.989, 1.80),
    row("pruned", 0.988, 2.00),
    row("pruned-dynamic", 0.988, 2.02, size_bytes=900),
    row("pruned-static", 0.980, 3.50),
)


def report(*candidates: Candidate, force: str | None = None, test: Comparison = TEST) -> dict[str, Any]:
    """Return the report of the stage, with one layer and one operator."""
    config = ChooseConfig(force=force)
    choice = decide(candidates, budget=config.budget, force=force)
    measured = Measured(candidates, rounds=50, settled=0.999)
    return report_of(measured, choice, test, config=config) | {
        "layers": [{"name": "conv", "dense_bytes": 640, "bytes": 320, "dense_us": 10.0, "us": 5.0}],
        "operators": {"fp32": {"Conv": 1}} | {choice.name: {"Conv": 1, "QLinearConv": 2}},
        "int8": choice.name.endswith(("dynamic", "static")),
        "earlier_notes": ["no candidate other: no layer gains"],
        "float_layers": [{"reason": "it is too small", "layers": ["fc"]}] if choice.name != "fp32" else [],
    }
