"""A hand-over that breaks its promise is named; one that keeps it is not."""

import numpy as np
import pytest

from pipeline.export import Floats
from pipeline.verify import Handover, handover_to_onnx, judge, print_verdicts

LABELS = np.zeros(200, np.int64)


def answers(*, wrong: int = 0, shift: float = 0.0) -> Floats:
    """Return [200, 2] probabilities of which the first `wrong` choose the wrong class."""
    right = np.tile(np.array([0.9 - shift, 0.1 + shift], np.float32), (200, 1))
    right[:wrong] = right[:wrong, ::-1]
    return right


def breaches(*rows: Handover, budget: float = 0.5) -> list[str | None]:
    return [verdict.breach for verdict in judge(rows, LABELS, budget=budget)]


DENSE = Handover("dense", answers(wrong=2), 0, 1)


def test_equal_answers_keep_every_promise() -> None:
    assert breaches(DENSE, Handover("ONNX", answers(wrong=2), 1.0, 1e-6)) == [None, None]


def test_accuracy_within_the_budget_is_kept() -> None:
    assert breaches(DENSE, Handover("pruned", answers(wrong=3), 0, 1)) == [None, None]


def test_accuracy_below_the_budget_is_a_breach() -> None:
    assert breaches(DENSE, Handover("pruned", answers(wrong=4), 0, 1))[1] == (
        "lost 1.00 points against dense, at most 0.5 are promised"
    )


def test_other_top_1_than_promised_is_a_breach() -> None:
    assert breaches(DENSE, Handover("ONNX", answers(wrong=3), 1.0, 1))[1] == "agrees on 99.50%, 100.00% are promised"


def test_larger_difference_than_promised_is_a_breach() -> None:
    assert breaches(DENSE, Handover("HTTP", answers(wrong=2, shift=0.01), 1.0, 1e-6))[1] == (
        "differs by 1.0e-02, at most 1e-06 is promised"
    )


@pytest.mark.parametrize(
    ("chosen", "breach"),
    [
        ("fp32", "agrees on 98.50%, 100.00% are promised"),
        ("pruned-dynamic", "agrees on 98.50%, 99.00% are promised"),  # PyTorch's int8 network is the row above
        ("static", None),  # the row above is float: only the budget was promised
    ],
)
def test_promise_of_a_graph_depends_on_where_it_was_quantized(chosen: str, breach: str | None) -> None:
    graph = handover_to_onnx(chosen, answers(wrong=5), min_agreement=0.99)
    assert breaches(DENSE, graph, budget=2)[1] == breach


def test_better_answers_than_dense_are_no_breach() -> None:
    assert breaches(DENSE, Handover("pruned", answers(wrong=0), 0, 1)) == [None, None]


def test_table_shows_every_hand_over(capsys: pytest.CaptureFixture[str]) -> None:
    print_verdicts(judge([DENSE, Handover("HTTP", answers(wrong=8), 0, 1)], LABELS, budget=0.5), count=200)
    printed = capsys.readouterr().err
    assert "99.00%" in printed
    assert "lost 3.00 points" in " ".join(printed.split())
