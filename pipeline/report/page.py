"""The report as one HTML file: no network, no script; light and dark, narrow and wide."""

from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from pipeline.compression.candidates import DENSE
from pipeline.report.plot import Point, draw
from pipeline.report.table import milliseconds, on_test

TEMPLATE = Path(__file__).with_name("page.html")
WIDE, NARROW = (880, 420), (360, 380)  # of the plot: text in a shrunk picture could not be read
FOLDED = 40  # more layers than these are shown when asked for


def write_page(report: dict[str, Any], path: Path, *, title: str) -> None:
    """Write the stage's report, as it stands in report.json, as a page."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(report, title=title), encoding="utf-8")


def render(report: dict[str, Any], *, title: str) -> str:
    """Return the page."""
    rows = {row["name"]: row for row in report["candidates"]}
    dense, best = rows[DENSE], rows[report["choice"]["name"]]
    floor_top1 = dense["val_top1"] * 100 - report["conditions"]["budget"]
    points = [_point(row, dense, chosen=row is best) for row in report["candidates"]]
    environment = Environment(undefined=StrictUndefined, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {
        "kB": _kilobytes,
        "ms": milliseconds,
        "count": lambda number: f"{number:,}",
        "percent": lambda v: f"{v:.2%}",
    }
    page = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return page.render(
        title=title,
        dense=dense,
        best=best,
        report=report,
        test_line=on_test(report),
        plots=[
            ("wide", draw(points, floor_top1=floor_top1, width=WIDE[0], height=WIDE[1])),
            ("narrow", draw(points, floor_top1=floor_top1, width=NARROW[0], height=NARROW[1])),
        ],
        operators=_operators(report["operators"], best["name"]),
        longest=max((max(layer["us"], layer["dense_us"]) for layer in report["layers"]), default=1) or 1,
        folded=len(report["layers"]) > FOLDED,
        base=DENSE,
        processor="CPU" if report["conditions"]["provider"] == "cpu" else "GPU",
    )


def _point(row: dict[str, Any], dense: dict[str, Any], *, chosen: bool) -> Point:
    return Point(
        name=row["name"],
        cost_ms=dense["cost_ms"] / row["speedup"],
        cost_low_ms=dense["cost_ms"] / row["speedup_high"],
        cost_high_ms=dense["cost_ms"] / row["speedup_low"],
        top1=row["val_top1"] * 100,
        size_bytes=row["size_bytes"],
        chosen=chosen,
    )


def _operators(census: dict[str, dict[str, int]], best: str) -> list[tuple[str, int, int]]:
    """Return (operator, how many in fp32, how many in what ships), the most frequent first."""
    before, after = census[DENSE], census[best]
    return [(kind, before.get(kind, 0), after.get(kind, 0)) for kind in dict.fromkeys((*before, *after))]


def _kilobytes(size_bytes: int) -> str:
    return f"{size_bytes / 1000:,.1f}" if size_bytes < 100_000 else f"{size_bytes / 1000:,.0f}"
