"""The table against ONNX Runtime's own dynamic quantization: every contender, what it costs, and what moves."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from pipeline.bench import dynamic
from pipeline.session import open_session


def small() -> tuple[nn.Module, tuple[int, ...]]:
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)), (3, 32)


def test_table_has_a_row_for_each_contender_and_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(dynamic.MODELS, "small", small)
    dynamic.main(["--models", "small", "--rounds", "3", "--out", str(tmp_path / "table.md")])
    table = (tmp_path / "table.md").read_text()
    assert capsys.readouterr().out == table
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| sm")]
    assert [(row[1], row[2].split(" (")[0]) for row in rows] == [
        (batch, name)
        for batch in ("1", "8")
        for name in ("ORT fp32", "ORT quantize_dynamic", "the same, no option", "row-wise int8")
    ]
    assert [row[6].split(" ")[0] for row in rows] == ["no", "yes", "yes", "no"] * 2
    assert [row[5] == "0" for row in rows] == [True, False, False, False] * 2


def test_answer_that_depends_on_its_batch_mates_is_seen(tmp_path: Path) -> None:
    class Mean(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x - x.mean(dim=0, keepdim=True)

    dynamic.export(Mean(), (2,), tmp_path / "mean.onnx")
    session = open_session(tmp_path / "mean.onnx")
    inputs = np.arange(16, dtype=np.float32).reshape(8, 2)
    assert dynamic.moved_by_others(session, inputs) > 1
