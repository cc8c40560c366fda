"""The table of compatible networks: every family is in it, a failure is a row, and parity of constants is no parity."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torchvision import models

import pipeline.bench.compat
from pipeline.bench.compat import FAMILIES, Row, chosen, largest_difference, lively, main, markdown, patches, try_model
from pipeline.bench.report import conditions
from pipeline.errors import PipelineError
from pipeline.export import Served
from tests.pipeline.compression.networks import HERE, random_model

WHERE = conditions() | {
    "images": 8,
    "side": 224,
    "rule": {"importance": "l2", "scope": "uniform", "round_to": 8},
}
IMAGES = patches(3, 32)


def test_every_torchvision_classifier_is_in_a_family() -> None:
    assert sorted(name for family in FAMILIES.values() for name in family) == sorted(models.list_models(module=models))


def test_small_members_of_every_family_are_taken_unless_all_are_asked_for() -> None:
    assert {family for family, _ in chosen([], everything=False)} == set(FAMILIES)
    assert len(chosen([], everything=False)) == len(FAMILIES) + 1
    assert len(chosen([], everything=True)) == len(models.list_models(module=models))
    assert chosen(["vgg16"], everything=False) == [("VGG", "vgg16")]


def test_unknown_model_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["vgg17"]) == 2
    assert "'vgg17' is no torchvision classification model" in capsys.readouterr().err


def test_network_goes_through_to_a_row_with_every_figure() -> None:
    row = try_model("squeezenet1_1", family="SqueezeNet", side=64, rounds=3)
    assert row.reason is None
    assert row.macs_pruned < 0.4 * row.macs
    assert row.params_pruned < 0.5 * row.params
    assert 0 < row.difference < 1e-3
    assert row.cheaper_low <= row.cheaper <= row.cheaper_high


def test_failure_is_a_row_with_its_reason_on_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: object, **_options: object) -> None:
        raise ZeroDivisionError("integer division\n or modulo by zero")

    monkeypatch.setattr(pipeline.bench.compat, "prune", fail)
    row = try_model("squeezenet1_1", family="SqueezeNet", side=64, rounds=3)
    assert row.reason == "ZeroDivisionError: integer division or modulo by zero"
    assert "auxiliary heads" in (try_model("googlenet", family="GoogLeNet").reason or "")


def test_report_is_written_after_every_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pipeline.bench.compat, "OUT", tmp_path / "compat")
    assert main(["googlenet", "inception_v3"]) == 0
    report = json.loads((tmp_path / "compat" / "report.json").read_text())
    assert [row["model"] for row in report["rows"]] == ["googlenet", "inception_v3"]
    assert "| GoogLeNet | googlenet | refused: model.name = 'googlenet' trains with" in capsys.readouterr().out


def test_table_has_ratios_and_conditions() -> None:
    row = Row("ResNet", "resnet18", None, 1_800_000_000, 450_000_000, 11_700_000, 3_000_000, 2e-6, 20.0, 3.8, 3.7, 3.9)
    text = markdown([row], WHERE)
    assert "| 1,800 -> 450 (4.00x) | 11.7 -> 3.0 | 2e-06 | 20.0 | 3.80x (3.70-3.90) | 0.95 |" in text
    for part in ("n = 8 random images", "21 interleaved rounds", "one thread", "torch-pruning", "round_to 8"):
        assert part in text


def test_answers_that_differ_are_refused() -> None:
    model = lively(random_model("squeezenet1_1", 32), IMAGES)
    with pytest.raises(PipelineError, match=r"differ by 0\.\d"):
        largest_difference(model, lambda x: np.full((len(x), 10), 0.1, np.float32), IMAGES)


@torch.no_grad()
def test_network_that_answers_every_image_alike_proves_nothing() -> None:
    model = random_model("squeezenet1_1", 32)
    conv = model.net.get_submodule("classifier.1")
    assert isinstance(conv, nn.Conv2d)
    conv.weight.zero_()
    with pytest.raises(PipelineError, match="every image gets the same answer"):
        largest_difference(model, lambda x: Served(model)(torch.from_numpy(x)).numpy(), IMAGES)


def test_zero_head_is_made_to_answer() -> None:
    model = random_model(f"{HERE}:small_vit", 32)
    weight = model.net.get_parameter("heads.head.weight")
    nn.init.zeros_(weight)
    lively(model, IMAGES)
    assert float(weight.detach().std()) == pytest.approx(0.02, rel=0.2)
