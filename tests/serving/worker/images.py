"""Encoded images for tests: solid colours, two-tone squares and photo-like noise, in any format."""

import io
from typing import Any

import numpy as np
from PIL import Image

Colour = tuple[int, int, int]
RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)


def encode(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """Return the image as a file of format `kind`."""
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def solid(colour: Colour, *, size: tuple[int, int] = (8, 8)) -> Image.Image:
    """Return an RGB image of one colour."""
    return Image.new("RGB", size, colour)


def halves(top: Colour, bottom: Colour, *, size: tuple[int, int] = (8, 8)) -> Image.Image:
    """Return an RGB image with one colour above another."""
    image = solid(top, size=size)
    image.paste(bottom, (0, size[1] // 2, *size))
    return image


def photo(*, size: tuple[int, int] = (320, 240), seed: int = 0) -> Image.Image:
    """Return smooth colours with noise: what a JPEG encoder works hard on."""
    generator = np.random.default_rng(seed)
    smooth = Image.fromarray(generator.integers(0, 256, (9, 12, 3), np.uint8)).resize(size, Image.Resampling.BILINEAR)
    noisy = np.asarray(smooth).astype(int) + generator.integers(-20, 21, (size[1], size[0], 3))
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))
