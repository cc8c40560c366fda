"""From trained weights to answers over HTTP: every candidate, real photographs, and the report of what ships."""

import base64
import io
import json
import tarfile
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from pipeline.artifact import load_artifact
from pipeline.export import export_onnx
from pipeline.models import ModelSpec, build
from pipeline.package import build_archive
from pipeline.session import open_session, probabilities
from serving.archive import verify_archive
from serving.client import Client
from serving.stack import Options
from serving.worker.preprocess import Preprocessing, decode
from tests.chains import FAST, made, run_pipeline
from tests.stacks import free_port, served

pytestmark = [pytest.mark.e2e, pytest.mark.multirank]

PHOTOS = Path(__file__).resolve().parents[3] / "shared" / "data" / "photos.tar"
SPEC = Preprocessing(height=224, width=224, channels=3, resize=256)
CANDIDATES = ("fp32", "dynamic", "pruned", "pruned-dynamic")
CLIENTS = 32


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    made(folder, "export", *FAST)
    return folder


@pytest.mark.parametrize("candidate", CANDIDATES)
def test_candidate_gives_over_http_what_it_gives_offline(trained: Path, candidate: str) -> None:
    forced = (*FAST, f"--choose.force={candidate}", "--choose.budget=100")
    archive = made(trained, "package", *forced)
    with zipfile.ZipFile(archive) as packed:
        kinds = {node.op_type for node in onnx.load_from_string(packed.read("model.onnx")).graph.node}
    assert ("MatMulIntegerToFloat" in kinds) is candidate.endswith("dynamic")
    with served(verify_archive(archive), Options(replicas=2)) as stack:
        verified = run_pipeline(trained, "verify", *forced, "--port", str(stack.topology.port))
    assert verified.returncode == 0, verified.stderr
    assert [line.split("│")[-2].strip() for line in verified.stderr.splitlines() if "│ HTTP" in line] == ["ok"]


def test_verify_refuses_an_endpoint_that_serves_another_model(trained: Path) -> None:
    archive = made(trained, "package", *FAST, "--choose.force=pruned")
    other = (*FAST, "--choose.force=fp32", "--choose.budget=100")
    with served(verify_archive(archive), Options(replicas=1)) as stack:
        verified = run_pipeline(trained, "verify", *other, "--port", str(stack.topology.port))
    assert verified.returncode == 2
    assert "serves a model with digest" in verified.stderr.splitlines()[-1]


def test_verify_without_a_stack_is_one_line(trained: Path) -> None:
    verified = run_pipeline(trained, "verify", *FAST, "--port", str(free_port()))
    assert verified.returncode == 1
    assert verified.stderr.splitlines()[-1].startswith("quartet: no answer from http://127.0.0.1:")
    assert "Traceback" not in verified.stderr


def test_bench_writes_what_ships_beside_its_baselines(trained: Path) -> None:
    summary = made(trained, "bench", *FAST, "--choose.force=pruned")
    report = json.loads((summary.parent / "report.json").read_text())
    assert [row["name"] for row in report["rows"]] == ["shipped (pruned)", "ORT fp32", "PyTorch eager fp32"]
    fp32 = {row["name"]: row for row in report["rows"]}["ORT fp32"]
    export = load_artifact(next((trained / "artifacts" / "export").glob("*/manifest.json")).parent)
    assert fp32["size_bytes"] == export.manifest.metrics["fp32_onnx_bytes"]
    assert "| ORT fp32 |" in summary.read_text()


def photographs() -> list[bytes]:
    """Return real photographs where they are, and otherwise pictures of the same sizes, made here."""
    if PHOTOS.is_file():
        with tarfile.open(PHOTOS) as archive:
            return [stream.read() for member in archive if (stream := archive.extractfile(member))]
    generator = np.random.default_rng(0)
    return [_picture(generator, width=500 if number % 4 else 2000) for number in range(40)]


def _picture(generator: np.random.Generator, *, width: int) -> bytes:
    small = Image.fromarray(generator.integers(0, 256, (24, 32, 3), dtype=np.uint8))
    buffer = io.BytesIO()
    small.resize((width, width * 3 // 4), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=95)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def resnet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[bytes], NDArray[np.float32]]]:
    """Serve a torchvision ResNet-18 at 224 px; give the address, the photographs and the offline answers."""
    folder = tmp_path_factory.mktemp("resnet")
    torch.manual_seed(0)
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    model = build(ModelSpec(name="resnet18", num_classes=10, channels=3, height=224, width=224, mean=mean, std=std))
    export_onnx(model, folder / "model.onnx", opset=20, metadata={})
    session = open_session(folder / "model.onnx")
    photos = photographs()
    offline = np.concatenate([probabilities(session, decode(photo, SPEC)[None]) for photo in photos])
    archive = build_archive(
        folder,
        name="photos",
        version="1.0",
        onnx=folder / "model.onnx",
        labels=[f"class {number}" for number in range(10)],
        preprocessing=SPEC,
        golden=[(photos[0], offline[0].tolist())],
        tolerance=1e-3,
        provenance={},
    )
    with served(verify_archive(archive), Options(replicas=2)) as stack:
        yield stack.topology.url, photos, offline


def by_class(predictions: list[dict[str, float]]) -> list[float]:
    return [item["probability"] for item in sorted(predictions, key=lambda item: item["index"])]


def test_photographs_are_larger_than_the_balancers_buffer_too(
    resnet: tuple[str, list[bytes], NDArray[np.float32]],
) -> None:
    sizes = [len(photo) for photo in resnet[1]]
    assert len(sizes) == 40
    assert max(sizes) > 131_072 > min(sizes)


@pytest.mark.parametrize("form", ["raw", "multipart", "base64"])
def test_photographs_get_the_offline_answers(resnet: tuple[str, list[bytes], NDArray[np.float32]], form: str) -> None:
    url, photos, offline = resnet

    def send(photo: bytes) -> list[float]:
        path = f"{url}/predictions/photos"
        encoded = base64.b64encode(photo).decode()
        response = {
            "raw": lambda: http.post(path, content=photo, params={"top_k": 10}),
            "multipart": lambda: http.post(path, files={"image": ("a.jpg", photo)}, params={"top_k": 10}),
            "base64": lambda: http.post(path, json={"image": encoded}, params={"top_k": 10}),
        }[form]()
        assert response.status_code == 200, response.text
        return by_class(response.json()["predictions"])

    with httpx.Client(timeout=60, trust_env=False) as http, ThreadPoolExecutor(4) as pool:
        answers = np.array(list(pool.map(send, photos)))
    assert np.abs(answers - offline).max() < 1e-6


def test_two_hundred_images_sent_32_at_a_time_get_the_offline_answers(trained: Path, tmp_path: Path) -> None:
    from sklearn.datasets import load_digits

    archive = made(trained, "package", *FAST, "--choose.force=pruned-dynamic")
    with zipfile.ZipFile(archive) as packed:
        packed.extract("model.onnx", tmp_path)
        session = open_session(tmp_path / "model.onnx")
        spec = Preprocessing.from_json(json.loads(packed.read("package.json"))["preprocessing"])
    images: list[bytes] = []
    for pixels in load_digits().images[:200]:
        buffer = io.BytesIO()
        Image.fromarray(np.round(pixels * (255 / 16)).astype(np.uint8)).save(buffer, "PNG")
        images.append(buffer.getvalue())
    with (
        served(verify_archive(archive), Options(replicas=2)) as stack,
        Client(stack.topology.url, model="digits") as client,
        ThreadPoolExecutor(CLIENTS) as pool,
    ):
        answers = list(pool.map(lambda image: client.predict(image, top_k=10), images))
    for image, answer in zip(images, answers, strict=True):
        offline = probabilities(session, decode(image, spec)[None])[0]
        online = {candidate.index: candidate.probability for candidate in answer.predictions}
        assert [np.float32(online[k]) for k in range(10)] == offline.tolist()
