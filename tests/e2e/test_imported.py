"""From somebody's `.onnx` and images to an archive, to answers over HTTP, and to the reports."""

import base64
import io
import json
import zipfile
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from PIL import Image

from serving.archive import verify_archive
from serving.stack import Options
from tests.chains import made, run_pipeline
from tests.given import LABELS, conv_text, write_graph, write_images
from tests.stacks import served

pytestmark = pytest.mark.e2e

GIVEN = ("--onnx", "given.onnx", "--data", "images")
HOW = ("--onnx.mean=0.5,0.4,0.3", "--onnx.std=0.2", "--static.methods=minmax", "--choose.rounds=5")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("imported")
    write_graph(folder, conv_text())
    write_images(folder / "images")
    return folder


@pytest.fixture(scope="module")
def archive(folder: Path) -> Path:
    return made(folder, "package", *GIVEN, *HOW)


def by_hand(folder: Path, image: bytes) -> list[float]:
    """Return the probabilities of the file as it was given, prepared with numpy."""
    pixels = np.asarray(Image.open(io.BytesIO(image)).convert("RGB"), np.float32) / 255
    x = ((pixels - np.array([0.5, 0.4, 0.3], np.float32)) / np.float32(0.2)).transpose(2, 0, 1)[None]
    (logits,) = onnxruntime.InferenceSession(folder / "given.onnx").run(None, {"x": x.astype(np.float32)})[0]
    powers = np.exp(logits - logits.max())
    return list(powers / powers.sum())


def test_golden_answers_of_the_archive_are_those_of_the_given_file(folder: Path, archive: Path) -> None:
    with zipfile.ZipFile(archive) as packed:
        golden = json.loads(packed.read("golden.json"))
        assert json.loads(packed.read("package.json"))["labels"] == list(LABELS)
    assert archive.name == "model.mar"
    for entry in golden:
        image = base64.b64decode(entry["image"])
        assert entry["probabilities"] == pytest.approx(by_hand(folder, image), abs=1e-3)


def test_choice_is_shown_with_what_does_not_apply(folder: Path, archive: Path) -> None:
    done = run_pipeline(folder, "compress", *GIVEN, *HOW)
    assert done.returncode == 0
    assert "import: already done" in done.stderr
    assert "import: not applied: pruned, dynamic, pruned-dynamic, pruned-static" in done.stderr
    assert [name for name in ("fp32", "static") if f" {name} " in done.stderr] == ["fp32", "static"]


def test_every_hand_over_from_the_given_file_to_http_is_compared(folder: Path, archive: Path) -> None:
    with served(verify_archive(archive), Options(replicas=1)) as stack:
        verified = run_pipeline(folder, "verify", *GIVEN, *HOW, "--port", str(stack.topology.port))
    assert verified.returncode == 0, verified.stderr
    rows = [line.split("│")[1].strip() for line in verified.stderr.splitlines() if "│" in line]
    assert (rows[0], rows[-1]) == ("given.onnx", "HTTP")


def test_report_compares_what_ships_with_the_given_file(folder: Path, archive: Path) -> None:
    done = run_pipeline(folder, "bench", *GIVEN, *HOW)
    assert done.returncode == 0, done.stderr
    assert "| given.onnx as given | 100.00% |" in (folder / done.stdout.strip().splitlines()[-1]).read_text()


def test_training_is_refused_for_a_finished_graph(folder: Path) -> None:
    done = run_pipeline(folder, "train", *GIVEN)
    assert done.returncode == 2
    assert done.stderr.startswith("quartet: there is no stage train for a recipe that names a finished ONNX file")
