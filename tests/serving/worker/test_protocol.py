"""What a request may look like and what it is answered."""

import base64
import json
import time
from typing import Any

import pytest

from serving.worker.preprocess import BadImage, TooManyPixels, UnsupportedImage
from serving.worker.protocol import MAX_IMAGES, Refused, answer_bytes, error_bytes, read_request, refuse_image
from tests.serving.worker.images import BLUE, GREEN, RED, encode, solid

PNG, PNG_2, PNG_3 = (encode(solid(colour)) for colour in (RED, GREEN, BLUE))
JPEG = encode(solid(RED), "JPEG")
# A stand-in for an image whose base64 has both characters of the other alphabet and needs padding.
AWKWARD = b"\xfb\xef\xff\xfe"
TEXT = base64.b64encode(PNG).decode()


def images(body: Any, **row: Any) -> list[bytes]:
    return list(read_request({"body": body} | row).images)


def refused(body: Any, **options: Any) -> Refused:
    with pytest.raises(Refused) as caught:
        read_request({"body": body}, **options)
    return caught.value


def dumps(value: Any) -> bytes:
    return json.dumps(value).encode()


def form(*parts: tuple[str, bytes], boundary: str = "----b0undary") -> bytes:
    """Return a form of (content-disposition, value), as a browser or curl writes it."""
    lines = [
        b"--%s\r\nContent-Disposition: %s\r\nContent-Type: image/png\r\n\r\n%s\r\n"
        % (boundary.encode(), disposition.encode(), value)
        for disposition, value in parts
    ]
    return b"".join(lines) + b"--" + boundary.encode() + b"--\r\n"


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_the_bytes_of_an_image_are_taken_as_they_are(kind: str) -> None:
    image = encode(solid(RED), kind)
    request = read_request({"body": bytearray(image)})
    assert request.images == (image,)
    assert not request.listed
    assert request.top_k == 5


def test_bytes_of_an_unknown_kind_are_left_to_the_decoder() -> None:
    assert images(b"%PDF-1.7") == [b"%PDF-1.7"]
    assert images(b"-- no form") == [b"-- no form"]


@pytest.mark.parametrize(
    "text",
    [
        base64.b64encode(AWKWARD).decode(),
        "data:image/png;base64," + base64.b64encode(AWKWARD).decode(),
        "DATA:;base64," + base64.b64encode(AWKWARD).decode(),
        base64.b64encode(AWKWARD).decode().rstrip("="),
        base64.b64encode(AWKWARD).decode().removesuffix("="),  # one of two is missing
        base64.urlsafe_b64encode(AWKWARD).decode(),
        base64.b64encode(AWKWARD).decode()[:4] + "\n" + base64.b64encode(AWKWARD).decode()[4:] + "\r\n ",
    ],
)
def test_base64_is_understood_in_every_usual_spelling(text: str) -> None:
    assert images(dumps({"image": text})) == [AWKWARD]


@pytest.mark.parametrize("text", ["####", "Zm9v!mFy", "Z", "\u00fc", "data:image/png,Zm9v"])
def test_what_is_no_base64_is_refused_and_names_the_field(text: str) -> None:
    error = refused(dumps({"image": text}))
    assert (error.status, error.code, str(error)) == (400, "bad_base64", '"image" is not base64')


@pytest.mark.parametrize(
    ("value", "listed"),
    [
        (TEXT, False),
        ({"image": TEXT}, False),
        ({"images": [TEXT]}, True),
        ({"images": [{"image": TEXT}]}, True),
        ([TEXT], True),
        ([{"image": TEXT}], True),
    ],
)
def test_json_forms_with_one_image_give_that_image(value: Any, listed: bool) -> None:
    for body in (dumps(value), b"\xef\xbb\xbf \n" + dumps(value), value):  # the last: decoded by a plain TorchServe
        request = read_request({"body": body})
        assert request.images == (PNG,)
        assert request.listed is listed


def test_a_list_keeps_its_order() -> None:
    value = [base64.b64encode(image).decode() for image in (PNG, PNG_2, PNG_3)]
    assert images(dumps(value)) == [PNG, PNG_2, PNG_3]


def test_a_wrong_item_of_a_list_is_named_by_its_position() -> None:
    assert str(refused(dumps([TEXT, "###"]))) == '"images[1]" is not base64'
    assert str(refused(dumps([TEXT, 3]))) == '"images[1]" must be a string of base64'
    for item in ({"picture": TEXT}, {"image": TEXT, "picture": TEXT}):
        assert "images[1] must be" in str(refused(dumps([TEXT, item])))


@pytest.mark.parametrize(
    "body",
    [
        b'"lone quote',
        b'{"image": "abc',
        b'{"image": "\xf1"}',
        b"null",
        b"123",
        b" true\n",
        b"[]",
        b"{}",
        b'{"images": []}',
        b'{"images": "abc"}',
        b'{"picture": "abc"}',
        b'{"image": NaN}',
        b'{"image": "YQ==", "images": ["YQ=="]}',
        b'{"image": "YQ==", "image": "Yg=="}',
        b'{"image": 3}',
        b'{"image": null}',
        b'{"image": ' + b"9" * 5000 + b"}",
        b"[" * 10_000,
        b"[" * 10_000 + b"]" * 10_000,
        b'{"image":' * 100_000,
        b"",
        b" \r\n\t",
        b"\xef\xbb\xbf",
    ],
)
def test_what_holds_no_image_is_the_clients_fault_and_is_found_at_once(body: bytes) -> None:
    begin = time.process_time()
    assert refused(bytearray(body)).status == 400
    assert time.process_time() - begin < 0.2


@pytest.mark.parametrize(
    "body",
    [
        b'{"image": "YQ==", "top_k": NaN}',
        b'{"image": "YQ==", "top_k": 1, "top_k": 2}',
        b'{"images": "YQ=="}',
        b'{"image": "YQ==", "other": 1}',
    ],
)
def test_json_is_read_strictly(body: bytes) -> None:
    assert refused(body).code == "bad_json"


@pytest.mark.parametrize("value", [None, 123, 1.5, True, [], {}, [None], [[TEXT]], {"image": {}}, "###"])
def test_decoded_json_without_an_image_is_refused(value: Any) -> None:
    assert refused(value).status == 400


def test_a_text_body_that_torchserve_decoded_is_read_like_bytes() -> None:
    assert images(json.dumps({"image": TEXT})) == [PNG]
    assert images(TEXT) == [PNG]


def test_a_body_that_torchserve_swallowed_is_refused_with_what_is_accepted() -> None:
    with pytest.raises(Refused, match="holds no image; send the bytes of an image") as caught:
        read_request({})
    assert caught.value.status == 400


def test_a_compressed_body_is_named() -> None:
    error = refused(b"\x1f\x8b\x08\0rest")
    assert (error.status, error.code) == (415, "compressed_body")


@pytest.mark.parametrize(
    "disposition",
    [
        'form-data; name="data"; filename="red.png"',
        'form-data; name="data"',
        'form-data; name="data"; filename="图片 ü.png"',
        "form-data; name=\"data\"; filename*=UTF-8''%E5%9B%BE%E7%89%87.png",
        'form-data; name="data"; filename="a; name=top_k; b.png"',
        'form-data; name=data; filename="quote\\"; name=top_k; in it.png"',
        "form-data",
    ],
)
def test_one_image_in_a_form_is_found_whatever_it_is_called(disposition: str) -> None:
    request = read_request({"body": form((disposition, PNG))})
    assert request.images == (PNG,)
    assert not request.listed


def test_a_form_with_several_images_of_one_name_is_a_list_in_order() -> None:
    name = 'form-data; name="data"; filename="x.png"'
    request = read_request({"body": form((name, PNG), (name, JPEG), (name, PNG_3))})
    assert request.images == (PNG, JPEG, PNG_3)
    assert request.listed


def test_the_text_fields_of_a_form_are_options_and_no_images() -> None:
    body = form(
        ('form-data; name="top_k"', b"2"),
        ('form-data; name="submit"', b"Upload"),
        ('form-data; name="data"; filename="x.png"', PNG),
    )
    request = read_request({"body": body})
    assert request.images == (PNG,)
    assert request.top_k == 2


def test_every_file_of_a_form_counts_even_when_it_is_no_image() -> None:
    for filename in ('filename="notes.txt"', "filename*=UTF-8''n%C3%B6tes.txt"):
        body = form(('form-data; name="a"; filename="x.png"', PNG), (f'form-data; name="b"; {filename}', b"notes"))
        assert images(body) == [PNG, b"notes"]


def test_an_image_without_a_file_name_counts_and_text_beside_it_does_not() -> None:
    assert images(form(('form-data; name="a"', PNG), ('form-data; name="b"', b"notes"))) == [PNG]


def test_a_form_with_nothing_but_text_is_left_to_the_decoder() -> None:
    assert images(form(('form-data; name="top_k"', b"2"), ('form-data; name="b"', b"notes"))) == [b"notes"]


def test_a_form_that_ends_early_is_not_answered_for_the_parts_that_arrived() -> None:
    name = 'form-data; name="data"; filename="x.png"'
    assert refused(form((name, PNG), (name, PNG_2))[:-20]).code == "bad_form"


def test_an_image_that_holds_line_breaks_and_dashes_leaves_a_form_unchanged() -> None:
    image = PNG + b"\r\n--\r\n--other\r\n\r\n--"
    assert images(form(('form-data; name="data"; filename="x.png"', image))) == [image]


def test_an_empty_file_in_a_form_is_left_to_the_decoder() -> None:
    assert images(form(('form-data; name="data"; filename="x.png"', b""))) == [b""]


@pytest.mark.parametrize("boundary", ["b", "WebKitFormBoundary'()+_,-./:=?9", "a b", "x" * 70])
def test_every_boundary_that_the_standard_allows_is_found(boundary: str) -> None:
    assert images(form(('form-data; name="data"', PNG), boundary=boundary)) == [PNG]


@pytest.mark.parametrize(
    "body",
    [
        form(('form-data; name="data"', PNG))[:-20],
        form(('form-data; name="data"', PNG)).replace(b"\r\n\r\n", b"\r\n"),
        b"--b\r\n--b--",
    ],
)
def test_a_damaged_form_is_refused(body: bytes) -> None:
    error = refused(body)
    assert error.status == 400
    assert error.code in ("bad_form", "no_image")


def test_named_parts_of_a_plain_torchserve_are_images_and_options() -> None:
    request = read_request({"data": bytearray(PNG), "second": bytearray(PNG_2), "top_k": bytearray(b"3")})
    assert request.images == (PNG, PNG_2)
    assert request.listed
    assert request.top_k == 3


def test_a_single_named_part_is_one_image() -> None:
    for name in ("data", "image", "file"):
        request = read_request({name: bytearray(PNG), "top_k": bytearray(b"3")})
        assert request.images == (PNG,)
        assert not request.listed
        assert request.top_k == 3


@pytest.mark.parametrize("name", ["body", "data"])
def test_a_part_that_is_called_like_a_body_does_not_hide_the_others(name: str) -> None:
    request = read_request({name: bytearray(PNG), "second": bytearray(PNG_2)})
    assert request.images == (PNG, PNG_2)


def test_too_many_images_are_refused_with_the_limit() -> None:
    name = 'form-data; name="data"; filename="x.png"'
    fits, exceeds = [TEXT] * MAX_IMAGES, [TEXT] * (MAX_IMAGES + 1)
    assert len(images(dumps(fits))) == MAX_IMAGES == 16
    for body in (dumps(exceeds), dumps({"images": exceeds}), form(*[(name, PNG)] * 17)):
        error = refused(body)
        assert (error.status, error.code) == (413, "too_many_images")
        assert str(error) == "17 images in one request; the limit is 16"


@pytest.mark.parametrize(("text", "top_k"), [("1", 1), ("3", 3), ("007", 7), ("1" + "0" * 30, 10**30)])
def test_top_k_of_the_query_is_a_number_as_text(text: str, top_k: int) -> None:
    assert read_request({"body": PNG}, top_k=text).top_k == top_k


def test_top_k_of_the_query_wins_over_the_one_in_the_body() -> None:
    body = dumps({"image": TEXT, "top_k": 2})
    assert read_request({"body": body}).top_k == 2
    assert read_request({"body": body}, top_k="4").top_k == 4


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "", " 1", "one", "1e3", "\u0663", "+1"])
def test_a_top_k_that_is_no_positive_number_is_refused(text: str) -> None:
    error = refused(PNG, top_k=text)
    assert (error.status, error.code) == (400, "bad_top_k")


@pytest.mark.parametrize("value", [0, -1, 1.0, True, [], "x"])
def test_a_top_k_in_json_that_is_no_positive_number_is_refused(value: Any) -> None:
    assert refused(dumps({"image": TEXT, "top_k": value})).code == "bad_top_k"


@pytest.mark.parametrize(
    "body",
    [
        b'{"s3cret": 1}',
        b'{"image": "s3cret!"}',
        b'"s3cret',
        b'[{"s3cret": 1}]',
        b"--s3cret\r\ns3cret",
        b'{"image": "YQ==", "top_k": "s3cret"}',
    ],
)
def test_no_error_repeats_what_was_sent(body: bytes) -> None:
    assert b"s3cret" not in error_bytes(refused(body))


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (BadImage("x"), 400, "bad_image"),
        (UnsupportedImage("x"), 415, "unsupported_image"),
        (TooManyPixels("x"), 413, "image_too_large"),
    ],
)
def test_each_kind_of_bad_image_has_its_status(error: BadImage, status: int, code: str) -> None:
    alone = refuse_image(error, None)
    assert (alone.status, alone.code, str(alone)) == (status, code, "x")
    assert [str(refuse_image(error, position)) for position in (0, 2)] == ["images[0]: x", "images[2]: x"]


def test_an_error_is_one_json_object() -> None:
    assert json.loads(error_bytes(Refused(400, "bad_json", 'say "x"'))) == {
        "error": {"code": "bad_json", "message": 'say "x"'}
    }


def test_an_answer_is_strict_json() -> None:
    assert answer_bytes({"label": "ü", "p": 0.5}) == '{"label":"ü","p":0.5}'.encode()
    with pytest.raises(ValueError, match="not JSON compliant"):
        answer_bytes({"p": float("nan")})
