"""Tensor requests and compressed bodies in a batch with ordinary ones."""

import base64
import gzip
import json
import zlib
from pathlib import Path

import numpy as np
import pytest

from serving.worker.handler import Handler
from tests.colour import LABELS, colour_archive, png, unpack
from tests.serving.worker.batch import Answers, FakeContext, initialize


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Handler:
    return initialize(unpack(colour_archive(tmp_path_factory.mktemp("colour"))))


def infer_body(**changed: object) -> bytes:
    tensor = {"name": "image", "datatype": "BYTES", "shape": [1], "data": [base64.b64encode(png("red")).decode()]}
    return json.dumps({"inputs": [tensor | changed]}).encode()


def test_a_tensor_request_is_answered_beside_an_ordinary_one(loaded: Handler) -> None:
    context = FakeContext(Path(), headers=[{"x-infer": "json"}, {}])
    answers = Answers(loaded, [{"body": infer_body()}, {"body": png("blue")}], context)
    assert answers.statuses == [200, 200]
    first, second = answers.bodies[0]["outputs"]
    assert (first["name"], first["shape"], second["data"]) == ("probabilities", [1, len(LABELS)], ["red"])
    assert first["data"][0] > 0.99
    assert answers.best(1) == "blue"


def test_a_bad_tensor_request_is_refused_in_the_protocols_shape(loaded: Handler) -> None:
    context = FakeContext(Path(), headers=[{"x-infer": "json"}, {"x-infer": "json"}, {"x-infer": "2x"}])
    rows = [{"body": infer_body(shape=[2])}, {"body": infer_body(data=["bm9uZQ=="])}, {"body": infer_body()}]
    answers = Answers(loaded, rows, context)
    assert answers.statuses == [400, 415, 400]
    assert [set(body) for body in answers.bodies] == [{"error"}] * 3
    assert answers.bodies[0]["error"] == '"image" must hold as many images as its shape says: 2'
    assert answers.bodies[1]["error"].startswith("images[0]: ")


def test_binary_tensors_come_back_behind_the_json_with_its_length(loaded: Handler) -> None:
    head = {"parameters": {"binary_data_output": True}, "inputs": json.loads(infer_body())["inputs"]}
    context = FakeContext(Path(), headers=[{"x-infer": "json"}])
    (body,) = loaded.handle([{"body": json.dumps(head).encode()}], context)
    length = int(context.sent[0]["inference-header-content-length"])
    assert context.types == {0: "application/octet-stream"}
    sizes = [output["parameters"]["binary_data_size"] for output in json.loads(body[:length])["outputs"]]
    assert sizes == [4 * len(LABELS), 7]
    assert len(body) == length + sum(sizes)
    assert np.frombuffer(body[length : length + sizes[0]], "<f4").argmax() == 0
    assert body[-7:] == b"\x03\0\0\0red"


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_compressed_body_is_read(loaded: Handler, encoding: str) -> None:
    body = gzip.compress(png("red")) if encoding == "gzip" else zlib.compress(png("red"))
    context = FakeContext(
        Path(), headers=[{"content-encoding": encoding}, {"content-encoding": encoding, "x-body-limit": "9"}]
    )
    answers = Answers(loaded, [{"body": body}, {"body": body}], context)
    assert answers.statuses == [200, 413]
    assert answers.best() == "red"
    assert "larger than the limit of 9 bytes" in answers.bodies[1]["error"]["message"]
