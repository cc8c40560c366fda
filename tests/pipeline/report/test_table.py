"""The table fits 80 columns and says what ships, what is slower, and how it did on test images."""

from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.report.table import on_test, print_report
from tests.pipeline.rows import DENSE, SIX, report, row

PAGE = Path("artifacts/choose/0123456789abcdef/report/report.html")


def printed(capsys: pytest.CaptureFixture[str], made: dict[str, object]) -> list[str]:
    print_report(made, page=PAGE)
    return [line.rstrip() for line in capsys.readouterr().err.splitlines()]


def test_table_names_every_candidate_and_the_conditions(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, report(*SIX))
    assert lines[0].startswith("Candidates: batch 1, one thread, 50 rounds, ")
    assert " -> pruned-dynamic      98.80%   0.495 ± 0.010   2.02x (2.02-2.02)    1" in lines
    assert "  ! dynamic             99.00%   1.099 ± 0.010   0.91x (0.90-0.92)    1" in lines
    assert " ! slower than fp32" in lines
    assert lines[-1] == f"Report: {PAGE}"


def test_reason_and_test_result_are_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, report(*SIX))
    assert lines[-3].startswith("pruned-dynamic is the cheapest within 0.5 points of fp32: 2.02x (2.02-2.02)")
    assert lines[-2] == (
        "200 test images: pruned-dynamic 97.00%, fp32 98.00%; difference -1.00 points (95 %: -3.10 to +1.00)"
    )


def test_nothing_is_called_slower_where_nothing_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert not any("slower" in line for line in printed(capsys, report(DENSE, row("pruned", 0.99, 2.0))))


def test_table_of_large_networks_fits_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    large = (
        replace(c, size_bytes=346_000_000, cost_ms=1234.567, cost_spread_ms=12.345, speedup=12.34, speedup_high=12.99)
        for c in SIX
    )
    lines = printed(capsys, report(DENSE, *large))
    table = [line for line in lines if "±" in line]
    assert len(table) == 7
    assert max(map(len, table)) <= 80
    assert all(line.endswith(("346,000", "1")) for line in table)


def test_fp32_is_not_compared_with_itself() -> None:
    assert on_test(report(DENSE)) == "200 test images: fp32 97.00%"
