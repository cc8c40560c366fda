"""What a request may look like and what it is answered: rows of TorchServe <-> encoded images and JSON bytes.

Accepted: the bytes of an image; multipart/form-data with one or several images; JSON with base64: a string,
`{"image": ...}`, `{"images": [...]}` or a list of strings or of `{"image": ...}`. JSON and forms arrive as raw bytes
behind our balancer and already taken apart on a plain TorchServe. Content-Encoding may be gzip or deflate. No message
repeats any part of a request.

Errors are `{"error": {"code": ..., "message": ...}}`: 400 no_image, bad_image, bad_json, bad_base64, bad_form,
bad_top_k, bad_encoding; 413 too_many_images, image_too_large, body_too_large; 415 unsupported_image, compressed_body,
unsupported_encoding; 500 non_finite_output, internal_error; 503 out_of_memory. `top_k` beyond the number of classes
means all of them.
"""

import base64
import binascii
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from .preprocess import BadImage, TooManyPixels, UnsupportedImage, sniff

DEFAULT_TOP_K = 5
MAX_IMAGES = 16
MAX_DECODED_BYTES = 16 << 20  # where no balancer says what the limit of a body is
JSON_TYPE = "application/json"

_FORMS = 'send the bytes of an image, a form with an image, or JSON such as {"image": "<base64>"}'
_TOP_K = "top_k"
_SCALAR = re.compile(rb"(?:null|true|false|-?\d[\d.eE+-]*)")
_BOUNDARY = re.compile(rb"--([0-9A-Za-z'()+_,./:=? -]{0,69}[0-9A-Za-z'()+_,./:=?-])[ \t]*\r\n")
_PARAMETER = re.compile(rb';\s*([^\s;="]+)\s*=\s*("(?:[^"\\]|\\.)*"|[^;\s]*)')
_WHITESPACE = b" \t\r\n"
_DATA_URI = re.compile(r"\s*data:[^,]{0,200};base64,", re.IGNORECASE)
_WINDOWS = {"gzip": (31,), "x-gzip": (31,), "deflate": (15, -15)}  # deflate is zlib's format, and some send it bare
_URL_SAFE = bytes.maketrans(b"-_", b"+/")


class Refused(Exception):
    """A request that gets an error: HTTP status, a code for programs, a message for people."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(frozen=True, kw_only=True)
class Request:
    """The encoded images of one request; `listed` when the answer has to be a list, too."""

    images: tuple[bytes, ...]
    listed: bool
    top_k: int


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of a form."""

    name: str
    is_file: bool
    value: bytes


def read_request(row: Mapping[str, Any], *, top_k: str | None = None) -> Request:
    """Return what one row of a TorchServe batch asks for; `top_k` from the query wins over one in the body.

    Raises Refused.
    """
    values = {name: value for name, value in row.items() if name != _TOP_K}
    if len(values) == 1:
        images, listed, inner = _read_body(*values.values())
    else:  # a form that a plain TorchServe took apart: of each name, only the last part is left
        parts = [Part(name=name, is_file=False, value=_bytes(value)) for name, value in values.items()]
        images, listed, inner = _read_parts(parts)
    if _TOP_K in row:
        inner = _bytes(row[_TOP_K]).decode(errors="replace")
    if not images:
        raise Refused(400, "no_image", f"the request holds no image; {_FORMS}")
    if len(images) > MAX_IMAGES:
        raise Refused(413, "too_many_images", f"{len(images)} images in one request; the limit is {MAX_IMAGES}")
    return Request(images=tuple(images), listed=listed, top_k=_top_k(inner if top_k is None else top_k))


def inflate(body: bytes, encoding: str | None, *, most: int = MAX_DECODED_BYTES) -> bytes:
    """Return the body as it was before Content-Encoding `encoding`; raises Refused, also for more than `most` bytes."""
    name = (encoding or "identity").strip().lower()
    if name == "identity":
        return body
    if name not in _WINDOWS:
        raise Refused(415, "unsupported_encoding", "Content-Encoding must be gzip, deflate or identity")
    for window in _WINDOWS[name]:
        decoder = zlib.decompressobj(window)
        try:
            decoded = decoder.decompress(body, most + 1)
        except zlib.error:
            continue
        if len(decoded) > most:
            raise Refused(413, "body_too_large", f"decoded, the body is larger than the limit of {most} bytes")
        if decoder.eof and not decoder.unused_data:
            return decoded
    raise Refused(400, "bad_encoding", "the body is not what its Content-Encoding says, or it is cut off")


def refuse_image(error: BadImage, position: int | None) -> Refused:
    """Return the answer for an image that cannot be used; `position` in a request that carries several."""
    where = "" if position is None else f"images[{position}]: "
    if isinstance(error, TooManyPixels):
        return Refused(413, "image_too_large", f"{where}{error}")
    if isinstance(error, UnsupportedImage):
        return Refused(415, "unsupported_image", f"{where}{error}")
    return Refused(400, "bad_image", f"{where}{error}")


def answer_bytes(answer: Mapping[str, Any]) -> bytes:
    """Return strict JSON; ValueError for NaN or infinity."""
    return json.dumps(answer, allow_nan=False, separators=(",", ":"), ensure_ascii=False).encode()


def error_bytes(refused: Refused) -> bytes:
    """Return the JSON body of an error."""
    return answer_bytes({"error": {"code": refused.code, "message": str(refused)}})


Read = tuple[list[bytes], bool, Any]  # images, whether the answer is a list, top_k or None


def _read_body(body: Any) -> Read:
    """Read a whole body: raw bytes, or what TorchServe made of it."""
    if isinstance(body, str):
        text = body.strip()
        return _read_bytes(text.encode()) if text[:1] in ("{", "[", '"') else _read_json(text)
    if isinstance(body, (bytes, bytearray)):
        return _read_bytes(bytes(body))
    return _read_json(body)


def _read_bytes(body: bytes) -> Read:
    """Tell by the first bytes what a body is; whatever is no JSON and no form is taken for an image."""
    if sniff(body) is None:
        text = body.removeprefix(b"\xef\xbb\xbf").strip(_WHITESPACE)
        if text[:1] in (b"{", b"[", b'"') or _SCALAR.fullmatch(text):
            return _read_json(parse_json(text))
        if text.startswith(b"--") and (opened := _BOUNDARY.match(text)):
            return _read_parts(list(_split_form(text, opened)))
        if not text:
            raise Refused(400, "no_image", f"the body is empty; {_FORMS}")
        if text.startswith(b"\x1f\x8b"):
            raise Refused(415, "compressed_body", "the body is compressed; name it: Content-Encoding: gzip")
    return [body], False, None


def parse_json(text: bytes) -> Any:
    """Parse strict JSON: no NaN, no field twice, no nesting beyond what the parser bears."""
    try:
        return json.loads(text.decode(), parse_constant=_no_constant, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError):
        raise Refused(400, "bad_json", "the body begins like JSON but is not valid JSON in UTF-8") from None


def _no_constant(_name: str) -> NoReturn:
    raise ValueError


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(fields := dict(pairs)) != len(pairs):
        raise ValueError
    return fields


def _read_json(value: Any) -> Read:
    if isinstance(value, dict):
        top_k = value.get(_TOP_K)
        fields = value.keys() - {_TOP_K}
        if fields == {"image"}:
            return [read_base64(value["image"], "image")], False, top_k
        if fields == {"images"} and isinstance(value["images"], list):
            return _read_list(value["images"]), True, top_k
        raise Refused(400, "bad_json", 'the JSON object must have either the field "image" or the list "images"')
    if isinstance(value, list):
        return _read_list(value), True, None
    if isinstance(value, str):
        return [read_base64(value, "image")], False, None
    raise Refused(400, "bad_json", f"this JSON holds no image; {_FORMS}")


def _read_list(items: list[Any]) -> list[bytes]:
    if len(items) > MAX_IMAGES:
        raise Refused(413, "too_many_images", f"{len(items)} images in one request; the limit is {MAX_IMAGES}")
    images = []
    for position, item in enumerate(items):
        field = f"images[{position}]"
        if isinstance(item, dict) and item.keys() != {"image"}:
            raise Refused(400, "bad_json", f'{field} must be a base64 string or an object with the field "image"')
        images.append(read_base64(item["image"] if isinstance(item, dict) else item, field))
    return images


def read_base64(value: Any, field: str) -> bytes:
    """Decode base64 with or without data-URI prefix and padding, in either alphabet, across lines."""
    if not isinstance(value, str):
        raise Refused(400, "bad_base64", f'"{field}" must be a string of base64')
    prefix = _DATA_URI.match(value)
    try:
        text = value[prefix.end() if prefix else 0 :].encode("ascii").translate(_URL_SAFE, _WHITESPACE).rstrip(b"=")
        return base64.b64decode(text + b"=" * (-len(text) % 4), validate=True)
    except (UnicodeEncodeError, binascii.Error):
        raise Refused(400, "bad_base64", f'"{field}" is not base64') from None


def _split_form(body: bytes, opened: re.Match[bytes]) -> Iterator[Part]:
    """Yield the parts of multipart/form-data (RFC 7578); raises Refused when the form is cut off."""
    delimiter = b"\r\n--" + opened[1]
    # The first delimiter has no line break before it, an empty form has nothing after it.
    first, *rest = (b"\r\n" + body).split(delimiter)
    if first or not rest[-1].startswith(b"--"):
        raise Refused(400, "bad_form", "the multipart form is incomplete")
    for section in rest[:-1]:
        head, blank, value = section.partition(b"\r\n\r\n")
        if not blank:
            raise Refused(400, "bad_form", "a part of the multipart form has no headers")
        yield _part(head, value)


def _part(head: bytes, value: bytes) -> Part:
    for line in head.split(b"\r\n"):
        field, _, content = line.partition(b":")
        if field.strip().lower() == b"content-disposition":
            given = {name.lower(): text.strip(b'"') for name, text in _PARAMETER.findall(content)}
            is_file = b"filename" in given or b"filename*" in given
            return Part(name=given.get(b"name", b"").decode(errors="replace"), is_file=is_file, value=value)
    return Part(name="", is_file=False, value=value)


def _read_parts(parts: list[Part]) -> Read:
    """Take every file and every image of a form; other fields count only when there is neither."""
    top_k = next((part.value.decode(errors="replace") for part in parts if part.name == _TOP_K), None)
    rest = [part for part in parts if part.name != _TOP_K]
    chosen = [part.value for part in rest if part.is_file or sniff(part.value)]
    images = chosen or [part.value for part in rest]
    return images, len(images) > 1, top_k


def _bytes(value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode()
    return bytes(value) if isinstance(value, (bytes, bytearray)) else b""


def _top_k(value: Any) -> int:
    """Return a whole number of at least 1, from JSON or from text; the default for None."""
    if value is None:
        return DEFAULT_TOP_K
    if isinstance(value, str) and re.fullmatch(r"\d{1,1000}", value, re.ASCII):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise Refused(400, "bad_top_k", "top_k must be a whole number of at least 1")
    return value
