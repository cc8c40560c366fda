"""The Open Inference Protocol over HTTP, asked by NVIDIA's own client and by curl-like requests."""

import gzip
import json
import zlib
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException

from serving.archive import verify_archive
from serving.rundir import Stack
from serving.stack import Options
from serving.topology import Limits
from serving.worker.preprocess import decode
from tests.colour import LABELS, SPEC, colour_archive, png
from tests.stacks import served

pytestmark = pytest.mark.e2e

COLOURS = ("red", "blue", "white")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    archive = verify_archive(colour_archive(tmp_path_factory.mktemp("colour"), version="2.1"))
    with served(archive, Options(replicas=1, workers=1, limits=Limits(body_bytes=200_000))) as stack:
        yield stack


@pytest.fixture
def client(running: Stack) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(f"127.0.0.1:{running.topology.port}") as client:
        yield client


def pixels() -> NDArray[np.uint8]:
    return np.stack([decode(png(colour), SPEC) for colour in COLOURS])


def tensor(*, encoded: bool, binary: bool) -> triton.InferInput:
    """Return three images, as pixels or as files."""
    if not encoded:
        given = triton.InferInput("images", [3, SPEC.height, SPEC.width, 3], "UINT8")
        given.set_data_from_numpy(pixels(), binary_data=binary)
        return given
    given = triton.InferInput("image", [3], "BYTES")
    given.set_data_from_numpy(np.array([png(colour) for colour in COLOURS], np.object_), binary_data=True)
    return given


def get(running: Stack, path: str) -> httpx.Response:
    return httpx.get(f"{running.topology.url}{path}", trust_env=False)


def test_server_and_model_describe_themselves(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("colour")
    assert client.is_model_ready("colour", "2.1")
    assert not client.is_model_ready("colour", "1.0")
    assert client.get_server_metadata()["extensions"] == ["binary_tensor_data", "classification"]
    model = client.get_model_metadata("colour", "2.1")
    assert (model["name"], model["versions"]) == ("colour", ["2.1"])
    assert model["inputs"][0] == {"name": "images", "datatype": "UINT8", "shape": [-1, 32, 32, 3]}
    assert model["outputs"][0] == {"name": "probabilities", "datatype": "FP32", "shape": [-1, len(LABELS)]}


@pytest.mark.parametrize("compression", [None, "gzip", "deflate"])
@pytest.mark.parametrize(("encoded", "binary"), [(False, False), (False, True), (True, True)])
def test_client_gets_every_images_answer(
    client: triton.InferenceServerClient, encoded: bool, binary: bool, compression: str | None
) -> None:
    answer = client.infer(
        "colour",
        [tensor(encoded=encoded, binary=binary)],
        model_version="2.1",
        request_id="seven",
        request_compression_algorithm=compression,
        response_compression_algorithm=compression,
    )
    assert answer.get_response()["id"] == "seven"
    probabilities = answer.as_numpy("probabilities")
    assert probabilities.shape == (3, len(LABELS))
    assert probabilities.dtype == np.float32
    assert [LABELS[k] for k in probabilities.argmax(1)] == list(COLOURS)
    assert [label.decode() for label in answer.as_numpy("label")] == list(COLOURS)


@pytest.mark.parametrize("binary", [False, True])
def test_client_chooses_its_outputs(client: triton.InferenceServerClient, binary: bool) -> None:
    wanted = [triton.InferRequestedOutput("probabilities", binary_data=binary, class_count=2)]
    answer = client.infer("colour", [tensor(encoded=False, binary=True)], outputs=wanted)
    ranked = answer.as_numpy("probabilities")
    assert ranked.shape == (3, 2)
    first = ranked[0, 0].decode() if binary else ranked[0, 0]
    assert first.endswith(":0:red")
    assert answer.as_numpy("label") is None


@pytest.mark.parametrize(
    ("model", "version", "shape", "message"),
    [
        ("colour", "", [3, 16, 64, 3], r"the shape of \"images\" must be \[B, 32, 32, 3\]"),
        ("flowers", "", [3, 32, 32, 3], "not found; there are /predictions/colour"),
        ("colour", "9", [3, 32, 32, 3], "not found"),
    ],
)
def test_client_sees_the_reason_of_a_refusal(
    client: triton.InferenceServerClient, model: str, version: str, shape: list[int], message: str
) -> None:
    given = triton.InferInput("images", shape, "UINT8")
    given.set_data_from_numpy(pixels().reshape(shape))
    with pytest.raises(InferenceServerException, match=message):
        client.infer(model, [given], model_version=version)


def test_body_over_the_limit_is_refused_in_the_protocols_shape(running: Stack) -> None:
    """Also when it is small until it is unpacked."""
    url = f"{running.topology.url}/v2/models/colour/infer"
    large = json.dumps({"inputs": [{"name": "images", "data": [0] * 100_000}]}).encode()
    answers = [
        httpx.post(url, content=large, trust_env=False),
        httpx.post(url, content=gzip.compress(large), headers={"content-encoding": "gzip"}, trust_env=False),
    ]
    assert [answer.status_code for answer in answers] == [413, 413]
    assert answers[0].json() == {"error": "the body is larger than the limit of 200000 bytes"}
    assert answers[1].json() == {"error": "decoded, the body is larger than the limit of 200000 bytes"}


@pytest.mark.parametrize(
    ("method", "path", "status", "allow"),
    [
        ("GET", "/v2/models/colour/infer", 405, "POST"),
        ("PUT", "/v2/models/colour/infer", 405, "POST"),
        ("POST", "/v2/health/live", 405, "GET, HEAD"),
        ("GET", "/v2/models/colour/config", 404, None),
        ("GET", "/v2x", 404, None),
    ],
)
def test_other_paths_and_methods_are_refused(
    running: Stack, method: str, path: str, status: int, allow: str | None
) -> None:
    answer = httpx.request(method, f"{running.topology.url}{path}", trust_env=False)
    assert (answer.status_code, answer.headers.get("allow")) == (status, allow)
    assert isinstance(answer.json()["error"], str) is path.startswith("/v2/")


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_compressed_predictions_are_read(running: Stack, encoding: str, pack: Any) -> None:
    answer = httpx.post(
        f"{running.topology.url}/predictions/colour",
        content=pack(png("blue")),
        headers={"content-encoding": encoding},
        trust_env=False,
    )
    assert answer.status_code == 200
    assert answer.json()["predictions"][0]["label"] == "blue"


def test_headers_of_the_balancers_own_names_have_no_say(running: Stack) -> None:
    headers = {"x-infer": "json", "x-body-limit": "1", "x-top-k": "1"}
    url = f"{running.topology.url}/predictions/colour"
    answer = httpx.post(url, content=png("blue"), headers=headers, trust_env=False)
    assert len(answer.json()["predictions"]) > 1
