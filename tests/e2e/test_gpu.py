"""Training on NVIDIA GPUs. Skipped, by name, where there is none."""

from pathlib import Path

import pytest

from pipeline.artifact import load_artifact
from pipeline.machine import gpu_names
from tests.chains import FAST, made

pytestmark = [pytest.mark.e2e, pytest.mark.gpu]


@pytest.mark.skipif(not gpu_names(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gpu_training_learns_and_its_export_agrees(tmp_path: Path, precision: str) -> None:
    made(tmp_path, "export", *FAST, "--train.device=cuda", "--train.epochs=10", f"--train.precision={precision}")
    (train,) = (tmp_path / "artifacts" / "train").glob("*/manifest.json")
    artifact = load_artifact(train.parent)
    assert artifact.report["device"].startswith("cuda")
    assert artifact.manifest.metrics["val_top1"] > 0.9
