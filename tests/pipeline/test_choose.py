"""The cheapest candidate within the budget ships, and never one that is slower than fp32."""

from dataclasses import asdict
from pathlib import Path

import pytest
from PIL import Image

from pipeline.choose import Candidate, decide, draw, print_report, report_of
from pipeline.config import ChooseConfig


def row(name: str, top1: float, cost_ms: float, *, size_bytes: int = 1000, low: float | None = None) -> Candidate:
    speedup = 1.0 / cost_ms
    return Candidate(
        name=name,
        val_top1=top1,
        val_images=100,
        size_bytes=size_bytes,
        cost_ms=cost_ms,
        cost_spread_ms=0.01,
        speedup=speedup,
        speedup_low=speedup if low is None else low,
        speedup_high=speedup,
        first_call_ms=1.0,
    )


DENSE = row("fp32", 0.990, 1.0)


@pytest.mark.parametrize(
    ("others", "chosen"),
    [
        ([row("pruned", 0.986, 0.5), row("dynamic", 0.989, 0.8)], "pruned"),
        ([row("pruned", 0.984, 0.5), row("dynamic", 0.989, 0.8)], "dynamic"),  # 0.6 points is over the budget
        ([row("pruned", 0.985, 0.5)], "pruned"),  # exactly the budget
        ([row("dynamic", 0.999, 1.1)], "fp32"),  # slower, however accurate
        ([row("dynamic", 0.990, 0.97, low=0.99)], "fp32"),  # not proven faster
        ([row("pruned", 0.988, 0.50), row("pruned-dynamic", 0.989, 0.51)], "pruned-dynamic"),  # equal cost: accuracy
        (
            [row("pruned", 0.988, 0.50, size_bytes=9), row("pruned-dynamic", 0.988, 0.51, size_bytes=3)],
            "pruned-dynamic",
        ),
        ([], "fp32"),
    ],
)
def test_choice_follows_the_rule(others: list[Candidate], chosen: str) -> None:
    assert decide([DENSE, *others], budget=0.5, force=None).name == chosen


def test_reason_says_what_was_gained_and_lost() -> None:
    reason = decide([DENSE, row("pruned", 0.988, 0.5)], budget=0.5, force=None).reason
    assert "2.00x" in reason
    assert "+0.20 points lost" in reason


def test_keeping_fp32_says_why_the_others_were_not_taken() -> None:
    reason = decide([DENSE, row("dynamic", 0.990, 1.1), row("pruned", 0.9, 0.5)], budget=0.5, force=None).reason
    assert reason == "kept fp32: dynamic was 0.91x, pruned lost 9.00 points"


def test_forced_candidate_ships_whatever_was_measured() -> None:
    assert decide([DENSE, row("dynamic", 0.5, 3.0)], budget=0.5, force="dynamic").name == "dynamic"


def test_table_names_every_candidate_and_the_conditions(capsys: pytest.CaptureFixture[str]) -> None:
    candidates = [DENSE, row("pruned", 0.988, 0.5)]
    choice = decide(candidates, budget=0.5, force=None)
    print_report(report_of(candidates, choice, config=ChooseConfig()))
    printed = capsys.readouterr().err
    assert "-> pruned" in printed
    assert "98.80%" in printed
    assert "2.00x (2.00-2.00)" in printed
    assert "one thread" in printed


def test_plot_is_a_picture(tmp_path: Path) -> None:
    candidates = [DENSE, row("pruned", 0.988, 0.5)]
    draw(candidates, decide(candidates, budget=0.5, force=None), tmp_path / "plot.png", budget=0.5)
    with Image.open(tmp_path / "plot.png") as image:
        assert image.size == (1050, 675)


def test_report_holds_the_rows_and_the_choice() -> None:
    choice = decide([DENSE], budget=0.5, force=None)
    report = report_of([DENSE], choice, config=ChooseConfig(rounds=7))
    assert report["candidates"] == [asdict(DENSE)]
    assert report["conditions"]["rounds"] == 7
