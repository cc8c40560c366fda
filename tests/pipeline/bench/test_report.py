"""The Markdown says what was measured and under which conditions."""

from pipeline.bench.report import ROUNDS, conditions, markdown

ROW = {
    "name": "shipped (pruned)",
    "top1": 0.9833,
    "images": 359,
    "size_bytes": 388_000,
    "cost_ms": 0.137,
    "spread_ms": 0.004,
    "shipped_speedup": 1.0,
    "shipped_speedup_low": 1.0,
    "shipped_speedup_high": 1.0,
}
REPORT = {
    "recipe": "digits",
    "shipped": "pruned",
    "rows": [ROW, ROW | {"name": "ORT fp32", "shipped_speedup": 2.28, "shipped_speedup_high": 2.31}],
    "archive_bytes": 427_000,
    "decode_ms": 0.083,
    "conditions": conditions(),
}


def test_every_contender_has_a_row_with_its_ratio_and_interval() -> None:
    lines = markdown(REPORT).splitlines()
    assert "| shipped (pruned) | 98.33% | 0.137 ± 0.004 | 1.00x (1.00-1.00) | 388 |" in lines
    assert "| ORT fp32 | 98.33% | 0.137 ± 0.004 | 2.28x (1.00-2.31) | 388 |" in lines


def test_conditions_are_written_below_the_table() -> None:
    last = markdown(REPORT).splitlines()[-1]
    for part in ("n = 359 test images", f"{ROUNDS} rounds", "one thread", "torch 2.", "onnxruntime 1."):
        assert part in last
