"""The Open Inference Protocol (V2 of KServe and Triton) over HTTP: what a request asks for, and its answer's bytes.

One input: `images`, UINT8 [B, H, W, C], pixels as the model takes them, or `image`, BYTES [B] or [B, 1], encoded image
files (base64 in JSON). Outputs: `probabilities`, FP32 [B, K], and `label`, BYTES [B], each image's likeliest class.
Tensors come and go in the JSON or, with the binary-tensor extension, behind it. Errors are `{"error": message}`.

Shape legend: B images of one request, H height, W width, C channels, K classes.
"""

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .preprocess import Preprocessing
from .protocol import MAX_IMAGES, Refused, answer_bytes, parse_json, read_base64

PIXELS, ENCODED = "images", "image"
DATATYPE_OF = {PIXELS: "UINT8", ENCODED: "BYTES", "probabilities": "FP32", "label": "BYTES"}
OUTPUTS = ("probabilities", "label")
_LENGTH = struct.Struct("<I")  # before each element of a binary BYTES tensor


@dataclass(frozen=True, kw_only=True)
class Output:
    """A tensor that the client wants back. `classes`: that many likeliest ones as text, in place of all numbers."""

    name: str
    binary: bool
    classes: int | None = None


@dataclass(frozen=True, kw_only=True)
class InferRequest:
    """One request: pixels uint8 [B, H, W, C], or encoded images; the other is None or empty."""

    pixels: NDArray[np.uint8] | None
    images: tuple[bytes, ...]
    outputs: tuple[Output, ...]
    id: str | None


def read_infer(body: bytes, json_length: int | None, *, spec: Preprocessing) -> InferRequest:
    """Return what a body asks for, of which the first `json_length` bytes are JSON (None: all). Raises Refused."""
    head, tail = (body, b"") if json_length is None else (body[:json_length], body[json_length:])
    if json_length is not None and json_length > len(body):
        raise _bad("Inference-Header-Content-Length is more than the body has")
    request = parse_json(head)
    if not isinstance(request, dict):
        raise _bad('the body must be a JSON object with "inputs"')
    inputs, identifier = request.get("inputs"), request.get("id")
    if not isinstance(inputs, list) or len(inputs) != 1 or not isinstance(inputs[0], dict):
        raise _bad(f'"inputs" must hold one tensor: "{PIXELS}" (UINT8) or "{ENCODED}" (BYTES)')
    if identifier is not None and not isinstance(identifier, str):
        raise _bad('"id" must be a string')
    tensor = _Tensor.read(inputs[0], tail)
    outputs = _read_outputs(request)
    if tensor.name == PIXELS:
        return InferRequest(pixels=_pixels(tensor, spec), images=(), outputs=outputs, id=identifier)
    return InferRequest(pixels=None, images=_encoded(tensor), outputs=outputs, id=identifier)


def answer_infer(
    request: InferRequest, probabilities_BK: NDArray[np.float32], *, name: str, version: str, labels: Sequence[str]
) -> tuple[bytes, int | None]:
    """Return the body and, when tensors follow the JSON, how many of its bytes the JSON has."""
    described: list[dict[str, Any]] = []
    tail = b""
    for output in request.outputs:
        kind, shape, values = _values(output, probabilities_BK, labels)
        tensor: dict[str, Any] = {"name": output.name, "datatype": kind, "shape": shape}
        if output.binary:
            binary = _binary(values)
            tail += binary
            tensor["parameters"] = {"binary_data_size": len(binary)}
        else:
            tensor["data"] = values.ravel().tolist() if isinstance(values, np.ndarray) else values
        described.append(tensor)
    answer = {"model_name": name, "model_version": version, "outputs": described}
    head = answer_bytes(answer if request.id is None else answer | {"id": request.id})
    return (head + tail, len(head)) if any(output.binary for output in request.outputs) else (head, None)


def infer_error(refused: Refused) -> bytes:
    """Return the JSON body of an error."""
    return answer_bytes({"error": str(refused)})


@dataclass(frozen=True)
class _Tensor:
    """The input as it came: its values in JSON, or `binary` behind it."""

    name: str
    shape: tuple[int, ...]
    data: Any
    binary: bytes | None

    @classmethod
    def read(cls, given: Mapping[str, Any], tail: bytes) -> "_Tensor":
        name, shape, kind = given.get("name"), given.get("shape"), given.get("datatype")
        if name not in (PIXELS, ENCODED):
            raise _bad(f'the input must be called "{PIXELS}" (UINT8) or "{ENCODED}" (BYTES)')
        if kind != DATATYPE_OF[name]:
            raise _bad(f'the datatype of "{name}" must be {DATATYPE_OF[name]}')
        if not isinstance(shape, list) or not all(type(n) is int and n > 0 for n in shape):
            raise _bad(f'the shape of "{name}" must be a list of whole numbers of at least 1')
        if shape and shape[0] > MAX_IMAGES:
            raise Refused(413, "too_many_images", f"{shape[0]} images in one request; the limit is {MAX_IMAGES}")
        size = _parameters(given).get("binary_data_size")
        if (size is None) == ("data" not in given):
            raise _bad(f'"{name}" needs either "data" or the parameter binary_data_size')
        if (0 if size is None else size) != len(tail):
            raise _bad(f'binary_data_size of "{name}" is not what follows the JSON, {len(tail)} bytes')
        return cls(name, tuple(shape), given.get("data"), None if size is None else tail)


def _parameters(given: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = given.get("parameters", {})
    if not isinstance(parameters, dict):
        raise _bad('"parameters" must be an object')
    return parameters


def _pixels(tensor: _Tensor, spec: Preprocessing) -> NDArray[np.uint8]:
    wanted = (spec.height, spec.width, spec.channels)
    if tensor.shape[1:] != wanted:
        raise _bad(f'the shape of "{PIXELS}" must be [B, {", ".join(map(str, wanted))}]')
    count = math.prod(tensor.shape)
    if tensor.binary is not None:
        if len(tensor.binary) != count:
            raise _bad(f'"{PIXELS}" of this shape has {count} bytes, not {len(tensor.binary)}')
        return np.frombuffer(tensor.binary, np.uint8).reshape(tensor.shape)
    values = list(_flat(tensor.data, count + 1))
    if len(values) != count or not all(type(value) is int and 0 <= value <= 255 for value in values):
        raise _bad(f'"data" of "{PIXELS}" must be {count} whole numbers from 0 to 255')
    return np.array(values, np.uint8).reshape(tensor.shape)


def _encoded(tensor: _Tensor) -> tuple[bytes, ...]:
    if not tensor.shape or tensor.shape[1:] not in ((), (1,)):
        raise _bad(f'the shape of "{ENCODED}" must be [B] or [B, 1]')
    count = tensor.shape[0]
    if tensor.binary is None:
        images = [read_base64(value, ENCODED) for value in _flat(tensor.data, count + 1)]
    else:
        images = list(_elements(tensor.binary))
    if len(images) != count:
        raise _bad(f'"{ENCODED}" must hold as many images as its shape says: {count}')
    return tuple(images)


def _flat(data: Any, most: int) -> Iterator[Any]:
    """Yield the values of nested lists in order, and no more than `most`."""
    waiting = [data]
    while waiting and most > 0:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += reversed(value)
        else:
            most -= 1
            yield value


def _elements(binary: bytes) -> Iterator[bytes]:
    """Yield the elements of a binary BYTES tensor: each has its length before it."""
    place = 0
    while place < len(binary):
        if place + _LENGTH.size > len(binary):
            raise _bad(f'"{ENCODED}" is cut off')
        (length,) = _LENGTH.unpack_from(binary, place)
        place += _LENGTH.size + length
        if place > len(binary):
            raise _bad(f'"{ENCODED}" is cut off')
        yield binary[place - length : place]


def _read_outputs(request: Mapping[str, Any]) -> tuple[Output, ...]:
    """Return the outputs asked for; all of them when none is named."""
    binary = _flag(_parameters(request), "binary_data_output", default=False)
    asked = request.get("outputs")
    if asked is None or asked == []:
        return tuple(Output(name=name, binary=binary) for name in OUTPUTS)
    if not isinstance(asked, list) or not all(isinstance(one, dict) for one in asked):
        raise _bad('"outputs" must be a list of objects with a "name"')
    return tuple(_read_output(one, binary=binary) for one in asked)


def _read_output(given: Mapping[str, Any], *, binary: bool) -> Output:
    name, parameters = given.get("name"), _parameters(given)
    if name not in OUTPUTS:
        raise _bad(f"there are the outputs {' and '.join(OUTPUTS)}")
    classes = parameters.get("classification")
    if classes is not None and (name != OUTPUTS[0] or type(classes) is not int or classes < 1):
        raise _bad(f'"classification" is for {OUTPUTS[0]} and must be a whole number of at least 1')
    return Output(name=name, binary=_flag(parameters, "binary_data", default=binary), classes=classes)


def _flag(parameters: Mapping[str, Any], name: str, *, default: bool) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise _bad(f'the parameter "{name}" must be true or false')
    return value


def _values(
    output: Output, probabilities_BK: NDArray[np.float32], labels: Sequence[str]
) -> tuple[str, list[int], NDArray[np.float32] | list[str]]:
    """Return datatype, shape and values of an output."""
    if output.classes is None and output.name == OUTPUTS[0]:
        return "FP32", list(probabilities_BK.shape), probabilities_BK
    best_BK = np.argsort(-probabilities_BK, axis=1, kind="stable")
    if output.classes is None:
        return "BYTES", [len(best_BK)], [labels[k] for k in best_BK[:, 0]]
    best_BK = best_BK[:, : output.classes]
    rows = zip(probabilities_BK, best_BK, strict=True)
    return "BYTES", list(best_BK.shape), [f"{row[k]:f}:{k}:{labels[k]}" for row, best in rows for k in best]


def _binary(values: NDArray[np.float32] | list[str]) -> bytes:
    if isinstance(values, np.ndarray):
        return values.astype("<f4").tobytes()
    return b"".join(_LENGTH.pack(len(text)) + text for text in (value.encode() for value in values))


def _bad(message: str) -> Refused:
    return Refused(400, "bad_tensor", message)
