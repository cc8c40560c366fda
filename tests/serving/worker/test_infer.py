"""The Open Inference Protocol: what is understood, what is refused, and what comes back, bit for bit."""

import base64
import json
import struct
from typing import Any

import numpy as np
import pytest

from serving.worker.infer import InferRequest, answer_infer, read_infer
from serving.worker.preprocess import Preprocessing
from serving.worker.protocol import Refused

SPEC = Preprocessing(height=2, width=3, channels=1, resize=3)
PIXELS = np.arange(12, dtype=np.uint8).reshape(2, 2, 3, 1)
IMAGES = {"name": "images", "datatype": "UINT8", "shape": [2, 2, 3, 1], "data": PIXELS.tolist()}
FILES = [b"first", b""]
IMAGE = {"name": "image", "datatype": "BYTES", "shape": [2], "data": [base64.b64encode(f).decode() for f in FILES]}
PACKED = b"".join(struct.pack("<I", len(f)) + f for f in FILES)
ANSWERS = np.array([[0.25, 0.75], [0.5, 0.5]], np.float32)


def read(tensor: dict[str, Any], *, tail: bytes = b"", drop: str = "", **more: Any) -> InferRequest:
    given = {name: value for name, value in tensor.items() if name != drop}
    head = json.dumps({"inputs": [given], **more}).encode()
    return read_infer(head + tail, len(head) if tail else None, spec=SPEC)


def binary(tensor: dict[str, Any], tail: bytes) -> InferRequest:
    return read({**tensor, "parameters": {"binary_data_size": len(tail)}}, tail=tail, drop="data")


@pytest.mark.parametrize("data", [PIXELS.tolist(), PIXELS.ravel().tolist(), PIXELS.reshape(4, 3).tolist()])
def test_pixels_in_json_may_be_nested_or_flat(data: list[Any]) -> None:
    request = read({**IMAGES, "data": data})
    assert request.pixels is not None
    assert (request.pixels == PIXELS).all()
    assert request.pixels.dtype == np.uint8


def test_pixels_may_follow_the_json() -> None:
    request = binary(IMAGES, PIXELS.tobytes())
    assert request.pixels is not None
    assert (request.pixels == PIXELS).all()


@pytest.mark.parametrize(("shape", "data"), [([2], IMAGE["data"]), ([2, 1], [[one] for one in IMAGE["data"]])])
def test_encoded_images_in_json_are_base64(shape: list[int], data: list[Any]) -> None:
    assert read({**IMAGE, "shape": shape, "data": data}).images == tuple(FILES)


def test_encoded_images_may_follow_the_json_each_with_its_length() -> None:
    assert binary(IMAGE, PACKED).images == tuple(FILES)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        ({**IMAGES, "name": "pixels"}, 'must be called "images"'),
        ({**IMAGES, "datatype": "FP32"}, 'datatype of "images" must be UINT8'),
        ({**IMAGES, "shape": [2, 3, 2, 1]}, r'shape of "images" must be \[B, 2, 3, 1\]'),
        ({**IMAGES, "shape": [0, 2, 3, 1]}, "at least 1"),
        ({**IMAGES, "shape": [True, 2, 3, 1]}, "at least 1"),
        ({**IMAGES, "shape": "2"}, "must be a list"),
        ({**IMAGES, "data": PIXELS.ravel().tolist()[:-1]}, "must be 12 whole numbers from 0 to 255"),
        ({**IMAGES, "data": [*PIXELS.ravel().tolist(), 1]}, "must be 12 whole numbers"),
        ({**IMAGES, "data": [256] * 12}, "from 0 to 255"),
        ({**IMAGES, "data": [-1] * 12}, "from 0 to 255"),
        ({**IMAGES, "data": [1.0] * 12}, "whole numbers"),
        ({**IMAGES, "data": [True] * 12}, "whole numbers"),
        ({**IMAGES, "data": None}, "whole numbers"),
        ({**IMAGES, "parameters": {"binary_data_size": 12}}, 'either "data" or the parameter'),
        ({**IMAGES, "parameters": []}, '"parameters" must be an object'),
        ({**IMAGE, "shape": [1]}, "as many images as its shape says: 1"),
        ({**IMAGE, "shape": [3]}, "as many images as its shape says: 3"),
        ({**IMAGE, "shape": [2, 2]}, r"must be \[B\] or \[B, 1\]"),
        ({**IMAGE, "data": ["*", "*"]}, '"image" is not base64'),
        ({**IMAGE, "data": [1, 2]}, "must be a string of base64"),
    ],
)
def test_tensor_that_is_not_understood_is_refused_with_what_is_right(tensor: dict[str, Any], message: str) -> None:
    with pytest.raises(Refused, match=message) as caught:
        read(tensor)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("tensor", "tail", "message"),
    [
        (IMAGES, PIXELS.tobytes()[:-1], "has 12 bytes, not 11"),
        (IMAGE, PACKED[:-1], "is cut off"),
        (IMAGE, struct.pack("<I", 2**32 - 1) + b"x", "is cut off"),
        (IMAGE, PACKED + struct.pack("<I", 0), "as many images"),
    ],
)
def test_binary_tensor_of_another_size_is_refused(tensor: dict[str, Any], tail: bytes, message: str) -> None:
    with pytest.raises(Refused, match=message):
        binary(tensor, tail)


@pytest.mark.parametrize(
    ("body", "length", "message"),
    [
        (b"[]", None, "must be a JSON object"),
        (b"{", None, "not valid JSON"),
        (b"{}", None, '"inputs" must hold one tensor'),
        (b"{}", 3, "more than the body has"),
        (json.dumps({"inputs": [IMAGES, IMAGE]}).encode(), None, '"inputs" must hold one tensor'),
        (json.dumps({"inputs": [IMAGES], "id": 7}).encode(), None, '"id" must be a string'),
        (json.dumps({"inputs": [IMAGES], "outputs": 7}).encode(), None, '"outputs" must be a list'),
        (json.dumps({"inputs": [IMAGES], "outputs": [{"name": "x"}]}).encode(), None, "probabilities and label"),
        (
            json.dumps({"inputs": [IMAGES], "parameters": {"binary_data_output": 1}}).encode(),
            None,
            '"binary_data_output" must be true or false',
        ),
        (json.dumps({"inputs": [IMAGES]}).encode() + b"x", None, "not valid JSON"),
    ],
)
def test_request_that_is_not_understood_is_refused(body: bytes, length: int | None, message: str) -> None:
    with pytest.raises(Refused, match=message) as caught:
        read_infer(body, length, spec=SPEC)
    assert caught.value.status == 400


def test_bytes_that_nobody_announced_are_refused() -> None:
    head = json.dumps({"inputs": [IMAGES]}).encode()
    with pytest.raises(Refused, match="not what follows the JSON, 1 bytes"):
        read_infer(head + b"x", len(head), spec=SPEC)


def test_more_images_than_the_limit_are_413_before_they_are_read() -> None:
    with pytest.raises(Refused, match="17 images in one request; the limit is 16") as caught:
        read({**IMAGES, "shape": [17, 2, 3, 1], "data": []})
    assert caught.value.status == 413


def answered(**more: Any) -> tuple[dict[str, Any], bytes]:
    body, length = answer_infer(read(IMAGES, **more), ANSWERS, name="m", version="2", labels=["a", "bé"])
    return json.loads(body[:length]), b"" if length is None else body[length:]


def test_without_outputs_all_come_back_as_json() -> None:
    answer, tail = answered(id="one")
    assert answer == {
        "model_name": "m",
        "model_version": "2",
        "id": "one",
        "outputs": [
            {"name": "probabilities", "datatype": "FP32", "shape": [2, 2], "data": [0.25, 0.75, 0.5, 0.5]},
            {"name": "label", "datatype": "BYTES", "shape": [2], "data": ["bé", "a"]},
        ],
    }
    assert tail == b""


def test_outputs_come_in_the_order_asked_for_each_in_its_way() -> None:
    label = {"name": "label", "parameters": {"binary_data": True}}
    answer, tail = answered(outputs=[label, {"name": "probabilities"}])
    assert [output["name"] for output in answer["outputs"]] == ["label", "probabilities"]
    assert answer["outputs"][0]["parameters"] == {"binary_data_size": 12}
    assert tail == b"\x03\0\0\0b\xc3\xa9\x01\0\0\0a"
    assert answer["outputs"][1]["data"] == [0.25, 0.75, 0.5, 0.5]


def test_binary_probabilities_are_the_very_floats() -> None:
    answer, tail = answered(parameters={"binary_data_output": True}, outputs=[{"name": "probabilities"}])
    assert answer["outputs"][0]["shape"] == [2, 2]
    assert (np.frombuffer(tail, "<f4").reshape(2, 2) == ANSWERS).all()


def test_classification_gives_the_likeliest_as_text() -> None:
    answer, _ = answered(outputs=[{"name": "probabilities", "parameters": {"classification": 1}}])
    (output,) = answer["outputs"]
    assert (output["datatype"], output["shape"]) == ("BYTES", [2, 1])
    assert output["data"] == ["0.750000:1:bé", "0.500000:0:a"]
