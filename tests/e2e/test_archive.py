"""The archive on a plain TorchServe, in processes where this project's own packages cannot be imported."""

import base64
import json
import shutil
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.bare_torchserve import BareTorchServe, bare_torchserve
from tests.colour import colour_archive, encoded, png, square

pytestmark = pytest.mark.e2e

RAW = {"content-type": "application/octet-stream"}
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("archive")


@pytest.fixture(scope="module")
def archive(folder: Path) -> Path:
    return colour_archive(folder, name="colour", version="1.0-rc.1")


@pytest.fixture(scope="module")
def server(folder: Path, archive: Path) -> Iterator[BareTorchServe]:
    """A TorchServe whose workers would stop at `import serving` or `import pipeline`, with the archive loaded."""
    for name in ("serving", "pipeline"):
        (folder / "poison" / name).mkdir(parents=True)
        (folder / "poison" / name / "__init__.py").write_text("raise RuntimeError('the checkout was imported')")
    with bare_torchserve(environment={"PYTHONPATH": str(folder / "poison")}) as running:
        reply = running.register(archive, batch_size=8, max_batch_delay=100)
        assert reply.status_code == 200, reply.text + running.log()[-3000:]
        yield running


def post(server: BareTorchServe, body: bytes, **headers: str) -> httpx.Response:
    return server.inference.post("/predictions/colour", content=body, headers=RAW | headers)


def best(prediction: list[dict[str, Any]]) -> str:
    return str(prediction[0]["label"])


def test_the_worker_becomes_ready_without_the_checkout(server: BareTorchServe) -> None:
    assert [worker["status"] for worker in server.workers("colour")] == ["READY"]
    assert "the checkout was imported" not in server.log()


@pytest.mark.parametrize("colour", ["red", "green", "blue"])
def test_an_image_is_answered_with_its_colour(server: BareTorchServe, archive: Path, colour: str) -> None:
    reply = post(server, png(colour))
    answer = reply.json()
    package = json.loads(zipfile.ZipFile(archive).read("package.json"))
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "application/json"
    assert best(answer["predictions"]) == colour
    assert answer["predictions"][0]["probability"] > 0.999
    assert (answer["model"], answer["version"]) == ("colour", "1.0-rc.1")
    assert answer["digest"] == package["files"]["model.onnx"]


def test_every_request_of_a_batch_gets_its_own_status_and_answer(server: BareTorchServe) -> None:
    three = json.dumps([base64.b64encode(png(colour)).decode() for colour in ("green", "red", "blue")]).encode()
    heic = b"\0\0\0\x18ftypheic"
    bodies = {"red": png("red"), "cut": png("red")[:60], "blue": png("blue"), "three": three, "heic": heic, "none": b""}
    with ThreadPoolExecutor(len(bodies)) as pool:  # within the batch delay, so in one batch
        replies = dict(zip(bodies, pool.map(lambda body: post(server, body), bodies.values()), strict=True))
    assert {name: reply.status_code for name, reply in replies.items()} == {
        "red": 200,
        "cut": 400,
        "blue": 200,
        "three": 200,
        "heic": 415,
        "none": 400,
    }
    assert {reply.headers["content-type"] for reply in replies.values()} == {"application/json"}
    assert best(replies["red"].json()["predictions"]) == "red"
    assert best(replies["blue"].json()["predictions"]) == "blue"
    assert [best(each) for each in replies["three"].json()["predictions"]] == ["green", "red", "blue"]
    assert replies["cut"].json()["error"]["code"] == "bad_image"


def test_json_and_forms_that_torchserve_takes_apart_are_understood(server: BareTorchServe) -> None:
    text = base64.b64encode(png("blue")).decode()
    for value in (text, {"image": text}):
        reply = server.inference.post("/predictions/colour", json=value)
        assert best(reply.json()["predictions"]) == "blue"
    many = server.inference.post("/predictions/colour", json={"images": [text, text], "top_k": 1}).json()
    assert [len(each) for each in many["predictions"]] == [1, 1]
    for filename in ("a.png", "图片 ü.png"):
        reply = server.inference.post("/predictions/colour", files={"data": (filename, png("red"))})
        assert best(reply.json()["predictions"]) == "red"


@pytest.mark.parametrize("kind", ["text/plain", "application/json", "image/png", ""])
def test_an_image_is_an_image_whatever_its_declared_type(server: BareTorchServe, kind: str) -> None:
    reply = server.inference.post("/predictions/colour", content=png("green"), headers={"content-type": kind})
    assert reply.status_code == 200
    assert best(reply.json()["predictions"]) == "green"


def test_top_k_comes_by_the_header_of_the_balancer(server: BareTorchServe) -> None:
    assert len(post(server, png("red"), **{"x-top-k": "2"}).json()["predictions"]) == 2
    assert post(server, png("red"), **{"x-top-k": "0"}).status_code == 400


POISON = [
    b'"unbalanced text',
    b'{"image": "\xf1"}',
    b"null",
    b"123",
    b"[]",
    b"{}",
    b"[" * 10_000,
    b'{"image": NaN}',
]


def test_malformed_json_costs_no_worker_and_no_good_request(server: BareTorchServe) -> None:
    before = [(worker["id"], worker["startTime"], worker["pid"]) for worker in server.workers("colour")]
    for headers in (RAW, JSON):
        for body in POISON:
            for _ in range(3):
                started = time.monotonic()
                reply = server.inference.post("/predictions/colour", content=body, headers=headers)
                assert (reply.status_code, reply.headers["content-type"]) == (400, "application/json"), body[:20]
                assert isinstance(reply.json()["error"]["message"], str)
                assert time.monotonic() - started < 5
            assert best(post(server, png("red")).json()["predictions"]) == "red"
    assert [(worker["id"], worker["startTime"], worker["pid"]) for worker in server.workers("colour")] == before


def test_the_same_image_gives_the_same_probabilities_alone_and_in_a_batch(server: BareTorchServe) -> None:
    alone = post(server, png("red")).json()["predictions"]
    with ThreadPoolExecutor(8) as pool:
        bodies = [png("red"), png("blue"), png("green"), png("red")] * 2
        replies = list(pool.map(lambda body: post(server, body), bodies))
    assert [reply.json()["predictions"] for reply in replies[::4]] == [alone, alone]
    assert replies[3].json()["predictions"] == alone


def test_a_changed_archive_never_becomes_ready(server: BareTorchServe, archive: Path, tmp_path: Path) -> None:
    changed = tmp_path / "changed.mar"
    with zipfile.ZipFile(archive) as good, zipfile.ZipFile(changed, "w") as bad:
        for name in good.namelist():
            content = good.read(name)
            bad.writestr(name, content.replace(b'"probabilities": [', b'"probabilities": [ ', 1))
    reply = server.register(changed, model_name="changed", startup_timeout=30)
    try:
        assert reply.status_code != 200
        assert "golden.json was changed" in server.log()
    finally:
        server.management.delete("/models/changed")


def test_the_checkout_could_not_have_been_imported_unnoticed(server: BareTorchServe, tmp_path: Path) -> None:
    (tmp_path / "importing.py").write_text("import serving\n\ndef handle(data, context):\n    return data\n")
    manifest = {"model": {"modelName": "importing", "modelVersion": "1", "handler": "importing.py"}}
    with zipfile.ZipFile(tmp_path / "importing.mar", "w") as control:
        control.writestr("MAR-INF/MANIFEST.json", json.dumps(manifest))
        control.write(tmp_path / "importing.py", "importing.py")
    try:
        assert server.register(tmp_path / "importing.mar", startup_timeout=30).status_code != 200
        assert "the checkout was imported" in server.log()
    finally:
        server.management.delete("/models/importing")


def test_workers_write_nothing_for_each_request(server: BareTorchServe) -> None:
    post(server, b"not an image")
    quiet = len([line for line in server.log().splitlines() if "not an image" in line or "Traceback" in line])
    post(server, b"not an image")
    again = len([line for line in server.log().splitlines() if "not an image" in line or "Traceback" in line])
    assert again == quiet


def test_unpacked_archives_are_gone_after_the_model_is(folder: Path, archive: Path) -> None:
    twin = shutil.copyfile(archive, folder / "twin.mar")
    with bare_torchserve() as running:
        assert running.register(Path(twin), model_name="twin").status_code == 200
        assert len(list((running.folder / "tmp" / "models").iterdir())) == 1
        assert running.management.delete("/models/twin").status_code == 200
        assert list((running.folder / "tmp" / "models").iterdir()) == []


def test_encoded_colours_reach_the_model_upright(server: BareTorchServe) -> None:
    image = square("red")
    image.paste((0, 0, 255), (0, 24, 48, 48))
    assert best(post(server, encoded(image)).json()["predictions"]) == "red over blue"
    assert best(post(server, encoded(image.convert("CMYK"), "JPEG")).json()["predictions"]) == "red over blue"
