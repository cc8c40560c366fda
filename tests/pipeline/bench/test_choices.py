"""The choices are counted, and the gap is to what would ship instead."""

from pathlib import Path

import pytest

import pipeline.bench.choices
from pipeline.bench.choices import Repetition, gap_behind, main, markdown
from tests.pipeline.rows import DENSE, SIX, row


def test_gap_is_to_what_would_ship_instead() -> None:
    over_budget = (DENSE, row("pruned", 0.9, 3.0), row("dynamic", 0.99, 1.2))
    none_faster = (DENSE, row("dynamic", 0.99, 0.9))
    found = [
        gap_behind("pruned-dynamic", SIX, budget=0.5),
        gap_behind("dynamic", over_budget, budget=0.5),
        gap_behind("fp32", none_faster, budget=0.5),
    ]
    assert [(name, round(gap, 6)) for name, gap in found] == [("pruned", 1.01), ("fp32", 1.2), ("fp32", 1.0)]


def test_table_counts_choices_and_shows_the_spread() -> None:
    speedups = [{"fp32": 1.0, "pruned": 2.0 + i / 10} for i in range(3)]
    text = markdown([Repetition("pruned", "fp32", s["pruned"], s, 50 + i) for i, s in enumerate(speedups)])
    assert text.startswith("3 choices: pruned 3\nbehind it fp32, 2.100 times dearer (2.000-2.200); 50-52 rounds; ")
    assert "| pruned | 3 | 2.100 | 2.000 | 2.200 |" in text


def test_unknown_recipe_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--recipe", "nothing"]) == 2
    assert capsys.readouterr().err.startswith("quartet: recipe 'nothing' not found")


class Here:
    """Stands in for a pool of processes."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __enter__(self) -> "Here":
        return self

    def __exit__(self, *_: object) -> None: ...

    def imap(self, _work: object, recipes: list[object]) -> list[Repetition]:
        names = ["pruned"] * (len(recipes) - 1) + ["fp32"]
        return [Repetition(name, "fp32", 1.0, {"fp32": 1.0}, 5) for name in names]


def test_choices_that_differ_are_a_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(pipeline.bench.choices, "materialize", lambda *_, **__: [Path()])
    monkeypatch.setattr(pipeline.bench.choices, "graphs_of", lambda _: {})
    monkeypatch.setattr(pipeline.bench.choices, "get_context", lambda _: type("Context", (), {"Pool": Here}))
    assert main(["--times", "4"]) == 1
    assert "4 choices: pruned 3, fp32 1" in capsys.readouterr().out
    assert main(["--times", "1"]) == 0
