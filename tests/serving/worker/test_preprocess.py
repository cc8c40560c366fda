"""From encoded images to the model's input, equal on every machine."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageChops

from serving.worker.preprocess import BadImage, Preprocessing, TooManyPixels, UnsupportedImage, decode
from tests.serving.worker.images import BLUE, GREEN, RED, encode, halves, photo, solid

COLOUR = Preprocessing(height=4, width=4, channels=3, resize=4, background=(10, 20, 30))
GREY = Preprocessing(height=4, width=4, channels=1, resize=4)
NOT_QUITE_RED = (220, 20, 20)


def pixel(data: bytes, spec: Preprocessing = COLOUR) -> list[int]:
    """Return the centre pixel; the others must equal it."""
    pixels = decode(data, spec)
    assert (np.ptp(pixels, axis=(0, 1)) <= 8).all()
    return [int(value) for value in pixels[2, 2]]


def near(actual: list[int], wanted: tuple[int, ...], *, tolerance: int = 4) -> bool:
    return len(actual) == len(wanted) and all(abs(a - w) <= tolerance for a, w in zip(actual, wanted, strict=True))


@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
def test_a_colour_survives_the_mode_it_is_stored_in(mode: str) -> None:
    assert pixel(encode(solid(NOT_QUITE_RED).convert(mode))) == list(NOT_QUITE_RED)


@pytest.mark.parametrize("mode", ["L", "LA"])
def test_a_grey_image_is_repeated_over_the_channels(mode: str) -> None:
    assert pixel(encode(solid(NOT_QUITE_RED).convert(mode))) == [80, 80, 80]


def palette(colour: tuple[int, int, int]) -> Image.Image:
    image = Image.new("P", (8, 8), 0)
    image.putpalette([*colour, *(5, 5, 5) * 255])
    return image


def test_a_palette_image_gives_its_colours_and_not_its_indices() -> None:
    assert pixel(encode(palette(NOT_QUITE_RED))) == list(NOT_QUITE_RED)


def test_a_transparent_palette_entry_shows_the_background() -> None:
    assert pixel(encode(palette(NOT_QUITE_RED), transparency=0)) == [10, 20, 30]


def test_a_palette_image_with_another_transparent_entry_keeps_its_colour() -> None:
    assert pixel(encode(palette(NOT_QUITE_RED), transparency=7)) == list(NOT_QUITE_RED)


def test_a_bitmap_of_one_bit_spans_black_to_white() -> None:
    assert pixel(encode(Image.new("1", (8, 8), 1))) == [255, 255, 255]
    assert pixel(encode(Image.new("1", (8, 8), 0)), GREY) == [0]


@pytest.mark.parametrize("hidden", [RED, BLUE])
def test_colours_hidden_under_full_transparency_do_not_show(hidden: tuple[int, int, int]) -> None:
    assert pixel(encode(Image.new("RGBA", (8, 8), (*hidden, 0)))) == [10, 20, 30]


def test_half_transparency_mixes_with_the_background() -> None:
    assert near(pixel(encode(Image.new("RGBA", (8, 8), (210, 220, 230, 128)))), (110, 120, 130), tolerance=1)


@pytest.mark.parametrize(
    ("image", "transparent"), [(solid(NOT_QUITE_RED), NOT_QUITE_RED), (Image.new("L", (8, 8), 90), 90)]
)
def test_a_colour_declared_transparent_shows_the_background(image: Image.Image, transparent: object) -> None:
    assert pixel(encode(image, transparency=transparent)) == [10, 20, 30]


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
@pytest.mark.parametrize(("value", "expected"), [(0, 0), (0x8012, 0x80), (0xFFFF, 255)])
def test_sixteen_bits_are_scaled_to_eight(kind: str, value: int, expected: int) -> None:
    image = Image.fromarray(np.full((8, 8), value, np.uint16))
    assert pixel(encode(image, kind)) == [expected] * 3


def test_sixteen_bit_grey_with_a_transparent_value_shows_the_background() -> None:
    image = Image.fromarray(np.full((8, 8), 0x8012, np.uint16))
    assert pixel(encode(image, transparency=0x8012)) == [10, 20, 30]


def test_pixels_without_a_defined_white_are_refused_by_mode() -> None:
    floats = encode(Image.fromarray(np.full((8, 8), 0.5, np.float32)), "TIFF")
    with pytest.raises(UnsupportedImage, match="colour mode F is not supported"):
        decode(floats, COLOUR)


@pytest.mark.parametrize("colour", [RED, GREEN, BLUE])
@pytest.mark.parametrize("kind", ["JPEG", "TIFF"])
def test_cmyk_is_not_inverted(colour: tuple[int, int, int], kind: str) -> None:
    assert near(pixel(encode(solid(colour).convert("CMYK"), kind)), colour)


@pytest.mark.parametrize("colour", [RED, GREEN, BLUE])
def test_ycck_is_converted(colour: tuple[int, int, int]) -> None:
    # Pillow cannot write YCCK: store Y, Cb, Cr of the inks as plain channels (it inverts them), then declare them YCCK.
    luma_and_chroma = ImageChops.invert(solid(colour)).convert("YCbCr").split()
    inverted = [channel.point(lambda value: 255 - value) for channel in luma_and_chroma]
    cmyk = encode(Image.merge("CMYK", (*inverted, Image.new("L", (8, 8), 0))), "JPEG", quality=100)
    marker = cmyk.index(b"Adobe")
    assert cmyk[marker + 11] == 0
    assert near(pixel(cmyk[: marker + 11] + b"\2" + cmyk[marker + 12 :]), colour)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_every_accepted_format_gives_the_same_colours(kind: str) -> None:
    pixels = decode(encode(halves(NOT_QUITE_RED, (20, 20, 200), size=(32, 32)), kind), COLOUR)
    assert near(pixels[0, 0].tolist(), NOT_QUITE_RED, tolerance=12)
    assert near(pixels[3, 3].tolist(), (20, 20, 200), tolerance=12)


def test_a_tiff_with_64_bit_offsets_is_read() -> None:
    assert pixel(encode(solid(NOT_QUITE_RED), "TIFF", big_tiff=True)) == list(NOT_QUITE_RED)


ORIENTED = {
    1: ((0, 0), (0, 1)),
    2: ((0, 1), (0, 0)),
    3: ((1, 1), (1, 0)),
    4: ((1, 0), (1, 1)),
    5: ((0, 0), (1, 0)),
    6: ((0, 1), (1, 1)),
    7: ((1, 1), (0, 1)),
    8: ((1, 0), (0, 0)),
}  # EXIF orientation: quadrant (row, column) in which stored top left and stored top right are seen


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_turned_as_the_camera_says(orientation: int, kind: str) -> None:
    image = Image.new("RGB", (32, 32), (0, 0, 0))
    image.paste(RED, (0, 0, 16, 16))
    image.paste(BLUE, (16, 0, 32, 16))
    exif = Image.Exif()
    exif[0x0112] = orientation
    lossless = {"lossless": True} if kind == "WEBP" else {"quality": 95} if kind == "JPEG" else {}
    pixels = decode(encode(image, kind, exif=exif, **lossless), COLOUR)
    red, blue = ((3 * row, 3 * column) for row, column in ORIENTED[orientation])
    assert near(pixels[red].tolist(), RED, tolerance=10)
    assert near(pixels[blue].tolist(), BLUE, tolerance=10)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("exif", [b"Exif\0\0garbage", b"Exif\0\0MM\0*\xff\xff\xff\xff\1"])
def test_damaged_metadata_does_not_cost_the_image(kind: str, exif: bytes) -> None:
    assert near(pixel(encode(solid(RED), kind, exif=exif)), RED)


def whole(kind: str) -> bytes:
    if kind == "progressive":
        return encode(photo(), "JPEG", progressive=True)
    if kind == "lossless":
        return encode(photo(), "WEBP", lossless=True)
    return encode(photo(), kind)


@pytest.mark.filterwarnings("ignore:Truncated File Read", "ignore:Corrupt EXIF data")
@pytest.mark.parametrize("cut", [0.02, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("kind", ["JPEG", "progressive", "PNG", "WEBP", "lossless", "GIF", "BMP", "TIFF"])
def test_a_cut_file_is_refused_and_never_filled_up(kind: str, cut: float) -> None:
    data = whole(kind)
    with pytest.raises(BadImage, match="damaged or incomplete"):
        decode(data[: int(len(data) * cut)], COLOUR)


@pytest.mark.parametrize("kind", ["JPEG", "progressive"])
def test_a_jpeg_without_its_end_marker_is_refused(kind: str) -> None:
    with pytest.raises(BadImage, match="damaged or incomplete"):
        decode(whole(kind)[:-2], COLOUR)


def test_a_png_without_its_end_marker_is_complete() -> None:
    assert np.array_equal(decode(whole("PNG")[:-12], COLOUR), decode(whole("PNG"), COLOUR))


def bomb(width: int, height: int) -> bytes:
    """Return a PNG of a few bytes whose header announces a huge image."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


def test_an_image_with_too_many_pixels_is_refused_by_its_header() -> None:
    with pytest.raises(TooManyPixels, match=r"60000 x 60000 pixels, more than the limit of 50000000"):
        decode(bomb(60_000, 60_000), COLOUR)


def test_the_limit_itself_is_allowed() -> None:
    spec = Preprocessing(height=4, width=4, channels=3, resize=4, max_pixels=64)
    assert decode(encode(solid(RED)), spec).shape == (4, 4, 3)
    with pytest.raises(TooManyPixels):
        decode(encode(solid(RED, size=(13, 5))), spec)


def test_a_large_real_photo_is_read_when_the_limit_allows_it() -> None:
    spec = Preprocessing(height=4, width=4, channels=3, resize=4, max_pixels=200_000_000)
    huge = encode(Image.new("L", (14_000, 13_000), 90), "JPEG")
    assert pixel(huge, spec) == [90, 90, 90]


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", BadImage),
        (b"\0", UnsupportedImage),
        (b"hello", UnsupportedImage),
        (b"%PDF-1.7", UnsupportedImage),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", UnsupportedImage),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", UnsupportedImage),
    ],
)
def test_what_is_no_image_is_answered_with_the_accepted_formats(data: bytes, error: type[BadImage]) -> None:
    with pytest.raises(error, match="JPEG, PNG, WebP, GIF, BMP and TIFF"):
        decode(data, COLOUR)


def test_no_bytes_at_all_are_called_empty() -> None:
    with pytest.raises(BadImage, match="the image is empty"):
        decode(b"", COLOUR)


def test_lack_of_memory_is_not_blamed_on_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(Image.Image, "resize", exhausted)
    with pytest.raises(MemoryError):
        decode(encode(solid(RED)), COLOUR)


@pytest.mark.parametrize("data", [b"\xff\xd8\xff", b"BM secret", b"GIF89a", b"II*\0secret", b"\x89PNG\r\n\x1a\nsecret"])
def test_a_damaged_image_is_named_without_its_bytes(data: bytes) -> None:
    with pytest.raises(BadImage, match="damaged or incomplete") as caught:
        decode(data, COLOUR)
    assert "secret" not in str(caught.value)
    assert "object at" not in str(caught.value)


@pytest.mark.parametrize("kind", ["GIF", "WEBP"])
def test_an_animation_gives_its_first_frame(kind: str) -> None:
    red, green, blue = (solid(colour) for colour in (RED, GREEN, BLUE))
    moving = encode(red, kind, save_all=True, append_images=[green, blue])
    with Image.open(io.BytesIO(moving)) as image:
        assert getattr(image, "n_frames", 1) == 3
    assert near(pixel(moving), RED)
    assert np.array_equal(decode(moving, COLOUR), decode(moving, COLOUR))


def test_a_first_gif_frame_smaller_than_the_canvas_keeps_its_place() -> None:
    data = bytearray(encode(solid(RED), "GIF"))
    data[6:10] = struct.pack("<HH", 16, 16)  # the canvas; the frame stays 8 x 8 at the top left
    assert near(decode(bytes(data), COLOUR)[0, 0].tolist(), RED)
    assert np.array_equal(decode(bytes(data), COLOUR), decode(bytes(data), COLOUR))


def test_an_image_of_the_right_size_is_copied_exactly() -> None:
    stored = np.random.default_rng(1).integers(0, 256, (4, 4, 3), np.uint8)
    assert np.array_equal(decode(encode(Image.fromarray(stored)), COLOUR), stored)


def test_the_centre_is_cut_without_blur_when_nothing_is_resized() -> None:
    stored = np.random.default_rng(1).integers(0, 256, (9, 7, 3), np.uint8)
    spec = Preprocessing(height=4, width=4, channels=3, resize=7)
    assert np.array_equal(decode(encode(Image.fromarray(stored)), spec), stored[2:6, 1:5])


@pytest.mark.parametrize(("resize", "side"), [(1, 49), (1, 103), (599, 1181), (224, 333)])
def test_rounding_never_reaches_beyond_the_image(resize: int, side: int) -> None:
    spec = Preprocessing(height=resize, width=resize, channels=3, resize=resize)
    assert (decode(encode(solid(RED, size=(side, side))), spec) == RED).all()


def test_a_one_pixel_checkerboard_averages_to_grey() -> None:
    board = (np.indices((480, 640)).sum(axis=0) % 2 * 255).astype(np.uint8)
    spec = Preprocessing(height=32, width=32, channels=3, resize=32)
    assert decode(encode(Image.fromarray(board)), spec).mean() == pytest.approx(127.5, abs=1)


def test_an_extreme_aspect_ratio_shows_the_middle() -> None:
    tall = Image.new("RGB", (17, 900), BLUE)
    tall.paste(RED, (0, 400, 17, 500))
    assert pixel(encode(tall)) == list(RED)
    assert pixel(encode(Image.new("L", (1, 60_000), 77))) == [77, 77, 77]


@pytest.mark.parametrize("size", [(1280, 960), (960, 1280), (2563, 1921)])
def test_reduced_jpeg_decoding_stays_close_to_a_full_decode(size: tuple[int, int]) -> None:
    spec = Preprocessing(height=112, width=112, channels=3, resize=128)
    data = encode(photo(size=size), "JPEG", quality=92)
    with Image.open(io.BytesIO(data)) as image:
        full = encode(image.convert("RGB"), "BMP")
    difference = np.abs(decode(data, spec).astype(int) - decode(full, spec).astype(int))
    assert 0 < difference.mean() < 1
    assert difference.max() <= 8


def test_resizing_then_cutting_in_two_steps_gives_the_same_picture() -> None:
    image = photo(size=(320, 240))
    left, top = (128 - 80) // 2, (96 - 64) // 2
    expected = image.resize((128, 96), Image.Resampling.BILINEAR).crop((left, top, left + 80, top + 64))
    spec = Preprocessing(height=64, width=80, channels=3, resize=96)
    difference = np.abs(decode(encode(image), spec).astype(int) - np.asarray(expected).astype(int))
    assert difference[2:-2, 2:-2].max() <= 1  # at its edge a cut does not see the pixels that are cut away


def test_pixels_are_contiguous_writable_bytes() -> None:
    pixels = decode(encode(solid(RED)), GREY)
    assert pixels.shape == (4, 4, 1)
    assert pixels.dtype == np.uint8
    assert pixels.flags.c_contiguous
    assert pixels.flags.writeable


def test_preprocessing_survives_json() -> None:
    assert Preprocessing.from_json(COLOUR.to_json()) == COLOUR


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"channels": 4}, "channels must be 1 or 3, not 4"),
        ({"resize": 3}, "resize 3 must cover height 4"),
        ({"height": 0}, "height must be at least 1, not 0"),
        ({"background": (0, 0, 256)}, "background must be three values"),
        ({"mean": 1}, "mean"),
    ],
)
def test_a_wrong_number_is_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Preprocessing.from_json(COLOUR.to_json() | change)
