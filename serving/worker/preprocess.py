"""From the bytes of an image file to the pixels that the model takes. Training, evaluation and serving all use this.

Shape legend: H height, W width, C channels. Standard library, numpy and Pillow only: this file travels in the archive.
"""

import io
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Pixels = NDArray[np.uint8]

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
ACCEPTED = "accepted formats are JPEG, PNG, WebP, GIF, BMP and TIFF"

_MAGIC = (
    (b"\xff\xd8\xff", "JPEG"),
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"BM", "BMP"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"II+\0", "TIFF"),
    (b"MM\0+", "TIFF"),
)
_SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N")
_EIGHT_BITS = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr")

_EXIF_ORIENTATION = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class BadImage(ValueError):
    """These bytes give no usable image. The message is for the client and holds nothing of the bytes."""


class UnsupportedImage(BadImage):
    """A format or colour mode that is not read; the message names those that are."""


class TooManyPixels(BadImage):
    """The header announces more pixels than `Preprocessing.max_pixels`; nothing was decoded."""


@dataclass(frozen=True)
class Preprocessing:
    """The numbers that `decode` needs. The shorter side becomes `resize`, then the centre [height, width] is cut out.

    Transparent pixels are composited on `background` (R, G, B). Raises ValueError that names a wrong field.
    """

    height: int
    width: int
    channels: int  # 3: R, G, B; 1: luminance (ITU-R 601)
    resize: int
    background: tuple[int, int, int] = (0, 0, 0)
    max_pixels: int = 50_000_000

    def __post_init__(self) -> None:
        object.__setattr__(self, "background", tuple(self.background))
        for name in ("height", "width", "resize", "max_pixels"):
            if getattr(self, name) < 1:
                raise ValueError(f"preprocessing {name} must be at least 1, not {getattr(self, name)}")
        if self.channels not in (1, 3):
            raise ValueError(f"preprocessing channels must be 1 or 3, not {self.channels}")
        if self.resize < max(self.height, self.width):
            raise ValueError(
                f"preprocessing resize {self.resize} must cover height {self.height} and width {self.width}"
            )
        if len(self.background) != 3 or not all(0 <= value <= 255 for value in self.background):
            raise ValueError(f"preprocessing background must be three values of 0..255, not {self.background}")

    def to_json(self) -> dict[str, Any]:
        """Return plain values that JSON can hold; `from_json` is the inverse."""
        return asdict(self) | {"background": list(self.background)}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Rebuild from `to_json`; raises ValueError for an unknown, missing or wrong field."""
        try:
            return cls(**values)
        except TypeError as error:
            raise ValueError(f"preprocessing fields are wrong: {error}") from error


def sniff(data: bytes) -> str | None:
    """Return the accepted format that `data` announces in its first bytes, or None."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    return next((name for magic, name in _MAGIC if data.startswith(magic)), None)


def decode(data: bytes, spec: Preprocessing) -> Pixels:
    """Return uint8 [H, W, C], contiguous, for an encoded image: its first frame, upright, composited, resized, cut.

    Raises BadImage (UnsupportedImage, TooManyPixels). An incomplete image is refused, never filled up.
    """
    if not data:
        raise BadImage(f"the image is empty; {ACCEPTED}")
    name = sniff(data)
    if name is None:
        raise UnsupportedImage(f"this is not an image that can be read; {ACCEPTED}")
    try:
        return _pixels(data, name, spec)
    except (BadImage, MemoryError):
        raise
    except Exception as error:  # for a damaged file Pillow raises whatever its parsers stumble over
        raise BadImage(f"the {name} image is damaged or incomplete and could not be decoded") from error


def _pixels(data: bytes, name: str, spec: Preprocessing) -> Pixels:
    Image.MAX_IMAGE_PIXELS = None  # Pillow's own limit would refuse sizes that max_pixels allows
    with Image.open(io.BytesIO(data), formats=(name,)) as image:
        width, height = image.size
        if width * height > spec.max_pixels:
            raise TooManyPixels(f"the image has {width} x {height} pixels, more than the limit of {spec.max_pixels}")
        if name == "JPEG":
            # Decoding at 1/2, 1/4 or 1/8 is several times cheaper; what is left to resize stays at least a factor of 2.
            image.draft(None, _covering(image.size, 2 * spec.resize))
        image.load()
        return _cut(_flatten(_upright(image), spec), spec)


def _covering(size: tuple[int, int], shorter: int) -> tuple[int, int]:
    """Return `size` scaled so that its shorter side is `shorter`, rounded up."""
    return -(-size[0] * shorter // min(size)), -(-size[1] * shorter // min(size))


def _upright(image: Image.Image) -> Image.Image:
    """Return a loaded image as the camera was held. TIFF was turned by Pillow, which then drops the orientation."""
    try:
        orientation = image.getexif().get(_EXIF_ORIENTATION, 1)
    except Exception:  # damaged metadata: the pixels are good, and viewers show them as they are
        return image
    return image.transpose(_UPRIGHT[orientation]) if orientation in _UPRIGHT else image


def _flatten(image: Image.Image, spec: Preprocessing) -> Image.Image:
    """Return the image in mode L or RGB, without transparency; L when the model or the image is grey."""
    if image.mode in _SIXTEEN_BITS:
        image = _eight_bits(image)
    if image.mode not in _EIGHT_BITS:
        raise UnsupportedImage(f"colour mode {image.mode} is not supported; save the image as 8-bit RGB or greyscale")
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        backdrop = Image.new("RGBA", rgba.size, (*spec.background, 255))
        image = Image.alpha_composite(backdrop, rgba).convert("RGB")
    if spec.channels == 1 and image.mode != "L":
        return image.convert("RGB").convert("L")
    return image if image.mode in ("L", "RGB") else image.convert("RGB")


def _eight_bits(image: Image.Image) -> Image.Image:
    """Return a 16-bit grey image as L, or LA if one value is transparent; the high byte, as Pillow does for RGB."""
    values = np.asarray(image).astype(np.uint16)
    grey = Image.fromarray((values >> 8).astype(np.uint8))
    transparent = image.info.get("transparency")
    if transparent is None:
        return grey
    return Image.merge("LA", (grey, Image.fromarray(np.where(values == transparent, 0, 255).astype(np.uint8))))


def _cut(image: Image.Image, spec: Preprocessing) -> Pixels:
    """Resize and cut in one step, so that the cost follows the output, whatever the aspect ratio."""
    shorter = min(image.size)
    # A whole number of output pixels: an image that is already of the right size is copied, not blurred.
    left = (image.width * spec.resize // shorter - spec.width) // 2
    top = (image.height * spec.resize // shorter - spec.height) // 2
    right, bottom = left + spec.width, top + spec.height
    # Divided last: a factor of resize / shorter, rounded, could reach beyond the image.
    x0, y0, x1, y1 = (edge * shorter / spec.resize for edge in (left, top, right, bottom))
    cut = image.resize((spec.width, spec.height), Image.Resampling.BILINEAR, box=(x0, y0, x1, y1))
    if spec.channels == 3 and cut.mode == "L":
        cut = cut.convert("RGB")
    return np.array(cut, np.uint8).reshape(spec.height, spec.width, spec.channels)
