"""Which images travel in the archive, and what it asks of the machine that serves it."""

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pipeline.package_stage
from pipeline.artifact import StageResult, publish
from pipeline.config import Recipe
from pipeline.data import Arrays, DataSet, Split
from pipeline.package_stage import package, spread_over_classes
from pipeline.stage import Context
from serving.worker.contents import PROVIDERS
from tests.pipeline.test_choose import RECIPE, graph, split

LABELS = np.array([0, 0, 0, 1, 1, 2])
SPLIT = Split(Arrays(np.zeros((6, 2, 2), np.uint8)), np.arange(6), LABELS, "six")


def test_golden_images_come_from_every_class_before_any_comes_twice() -> None:
    assert LABELS[spread_over_classes(SPLIT, 3)].tolist() == [0, 1, 2]
    assert LABELS[spread_over_classes(SPLIT, 5)].tolist() == [0, 1, 2, 0, 1]


def test_fewer_images_than_asked_for_are_all_taken() -> None:
    assert len(spread_over_classes(SPLIT, 99)) == 6


@pytest.mark.parametrize(
    ("chosen", "provider", "tolerance"), [("pruned", "cpu", 1e-3), ("static", "cpu", 2e-2), ("fp16", "cuda", 2e-2)]
)
def test_archive_names_the_provider_that_it_was_measured_with_and_how_far_answers_may_be_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str, provider: str, tolerance: float
) -> None:
    """The CPU stands in for the GPU under its name."""
    monkeypatch.setitem(PROVIDERS, "cuda", ())
    dataset = DataSet(("dark", "bright"), train=split(corner=0), val=split(corner=0), test=split(corner=0))
    monkeypatch.setattr(pipeline.package_stage, "open_dataset", lambda _config, *, cache: dataset)

    def work(out: Path) -> StageResult:
        (out / "model.onnx").write_bytes(graph(heavy=0, corner=0))
        return StageResult(data={}, models={chosen: {}})

    facts: dict[str, Any] = {"source": "", "config": {}, "parent": None, "versions": {}, "data": {}}
    source = publish(tmp_path, stage="choose", facts=facts, work=work)
    recipe = Recipe.model_validate(RECIPE | {"export": {"provider": provider}})
    out = tmp_path / "out"
    out.mkdir()
    package(Context(recipe, source, out, tmp_path / "resume", tmp_path / "cache", tmp_path / "telemetry"))
    with zipfile.ZipFile(out / "tiny.mar") as archive:
        packed = json.loads(archive.read("package.json"))
    assert (packed["provider"], packed["tolerance"]) == (provider, tolerance)
