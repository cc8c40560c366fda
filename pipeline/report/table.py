"""The table of candidates in the terminal, at most 80 columns wide, with the choice and its result on test images."""

import sys
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from pipeline.compression.candidates import DENSE


def print_report(report: dict[str, Any], *, page: Path) -> None:
    """Print the stage's report to stderr; `page` is where the long form of it lies."""
    console = Console(file=sys.stderr, highlight=False, soft_wrap=True)
    where = report["conditions"]
    processor = "one thread" if where["provider"] == "cpu" else where["provider"]
    console.print(
        f"Candidates: batch {where['batch_size']}, {processor}, {where['rounds']} rounds, {where['cpu']['name']}"
    )
    console.print(table_of(report), soft_wrap=False)
    if any(row["speedup_high"] < 1 for row in report["candidates"]):
        console.print(f" ! slower than {DENSE}")
    console.print(report["choice"]["reason"])
    console.print(on_test(report))
    console.print(f"Report: {page}")


def table_of(report: dict[str, Any]) -> Table:
    """Return the table: an arrow before what ships, a mark before what is slower than fp32."""
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1))
    processor = "CPU" if report["conditions"]["provider"] == "cpu" else "GPU"
    for heading in ("candidate", "val top-1", f"{processor} ms/image", "speed-up (95 %)", "kB"):
        table.add_column(heading, justify="left" if heading == "candidate" else "right", no_wrap=True)
    for row in report["candidates"]:
        ships, slower = row["name"] == report["choice"]["name"], row["speedup_high"] < 1
        table.add_row(
            f"{'->' if ships else ' !' if slower else '  '} {row['name']}",
            f"{row['val_top1']:.2%}",
            f"{milliseconds(row['cost_ms'])} ± {milliseconds(row['cost_spread_ms'])}",
            f"{row['speedup']:.2f}x ({row['speedup_low']:.2f}-{row['speedup_high']:.2f})",
            f"{row['size_bytes'] / 1000:,.0f}",
            style="red" if slower else "bold" if ships else None,
        )
    return table


def on_test(report: dict[str, Any]) -> str:
    """Return, as one line, how the chosen candidate and fp32 answer the test images."""
    name, test = report["choice"]["name"], report["test"]
    if name == DENSE:
        return f"{test['images']} test images: {DENSE} {test['top1']:.2%}"
    return (
        f"{test['images']} test images: {name} {test['top1']:.2%}, {DENSE} {test['dense_top1']:.2%}; difference "
        f"{test['difference']:+.2f} points (95 %: {test['difference_low']:+.2f} to {test['difference_high']:+.2f})"
    )


def milliseconds(value: float) -> str:
    """Return a time with as many decimals as can mean something."""
    return f"{value:.{3 if value < 10 else 2 if value < 100 else 1}f}"
