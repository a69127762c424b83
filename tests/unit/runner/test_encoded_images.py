"""Encoded images: their size is read from the header within bounds, and hostile files are refused before decoding."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from baton.messages.request_limits import MAX_IMAGE_BYTES, MAX_IMAGE_PIXELS
from baton.model_formats.images import ImageLimits, UnusableImage, image_size
from baton.runner.images import decode_image
from tests.support.image_models import random_image

LIMITS = ImageLimits(most_bytes=1 << 16, most_pixels=1 << 16)


def encoded(image: Image.Image, name: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, name, **options)
    return file.getvalue()


def png_of_size(width: int, height: int) -> bytes:
    """A PNG file whose header names a size, with hardly any pixels behind it."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize("name", ["PNG", "JPEG", "WEBP", "GIF"])
def test_the_size_is_that_of_the_header(name: str) -> None:
    assert image_size(encoded(Image.new("RGB", (30, 20)), name), LIMITS) == (30, 20)


def test_an_image_is_as_large_as_it_is_shown() -> None:
    """Cameras write a picture that was taken upright as a turned one."""
    pixels = np.zeros((20, 30, 3), dtype=np.uint8)
    pixels[:, :10] = 255
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded(Image.fromarray(pixels), "PNG", exif=exif)
    assert image_size(data, LIMITS) == (20, 30)
    shown = np.asarray(decode_image(data))
    assert shown.shape == (30, 20, 3)
    assert shown[:10].min() == 255
    assert shown[10:].max() == 0


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "no image in PNG, JPEG, WEBP, GIF"),
        (b"\x89PNG\r\n\x1a\n", "damaged"),
        (encoded(Image.new("RGB", (8, 8)), "BMP"), "no image in"),
        (encoded(Image.new("RGB", (8, 8)), "TIFF"), "no image in"),
        (png_of_size(60_000, 60_000), "more pixels than are taken"),
        (png_of_size(10_000, 10_000), "at most 65536 are taken"),
        (png_of_size(257, 256), "257 x 256 pixels"),
        (random_image(1, 200, 200), "bytes; at most 65536"),
    ],
    ids=["nothing", "no header", "BMP", "TIFF", "a bomb", "a small bomb", "too many pixels", "too many bytes"],
)
def test_what_is_not_to_be_decoded_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(UnusableImage, match=reason):
        image_size(data, LIMITS)


def test_nothing_is_decoded_for_a_size() -> None:
    """Pillow's `getexif` decodes a PNG: here its pixels are damaged, and nobody notices."""
    whole = random_image(1, 60, 60)
    assert image_size(whole[:200], LIMITS) == (60, 60)


def test_a_jpeg_of_many_scans_is_refused() -> None:
    """Each is a pass over all pixels: one of 33 bytes may take 20 ms."""
    data = encoded(Image.new("RGB", (30, 20)), "JPEG", progressive=True)
    assert image_size(data, LIMITS) == (30, 20)
    with pytest.raises(UnusableImage, match="more than 64 scans"):
        image_size(data + b"\xff\xda" * 64, LIMITS)


def test_a_header_that_does_not_end_is_refused() -> None:
    comments = b"\xff\xfe\xff\xff" + bytes(65533)
    data = encoded(Image.new("RGB", (30, 20)), "JPEG")
    assert image_size(data[:2] + comments * 2 + data[2:], ImageLimits(MAX_IMAGE_BYTES, MAX_IMAGE_PIXELS)) == (30, 20)
    with pytest.raises(UnusableImage, match="damaged"):
        image_size(data[:2] + comments * 5 + data[2:], ImageLimits(MAX_IMAGE_BYTES, MAX_IMAGE_PIXELS))


@pytest.mark.parametrize("turn", range(1, 9))
def test_images_are_turned_as_pillow_does_it(turn: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = turn
    data = encoded(Image.open(io.BytesIO(random_image(2, 12, 7))), "PNG", exif=exif)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    assert np.array_equal(np.asarray(decode_image(data)), np.asarray(expected))
    assert image_size(data, LIMITS) == expected.size


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_an_image_that_ends_too_early_can_not_be_decoded(share: float) -> None:
    whole = random_image(1, 60, 60)
    data = whole[: int(len(whole) * share)]
    assert image_size(data, LIMITS) == (60, 60)
    with pytest.raises(UnusableImage, match="can't be decoded"):
        decode_image(data)


RAMP = (np.arange(40 * 200).reshape(200, 40) % 256).astype(np.uint8)
"""Of more rows than are converted at once."""


def on_white(grey: Any, alpha: Any) -> Any:
    """What is seen of a grey picture: its values, and how opaque each pixel is."""
    seen = 255 - (255 - grey.astype(float)) * alpha / 255
    return np.repeat(seen[..., None], 3, axis=2)


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "I;16", "CMYK"])
def test_images_of_all_depths_are_seen_as_they_are_in_8_bits(mode: str) -> None:
    values: dict[str, Any] = {"1": (RAMP > 127) * np.uint8(255), "I;16": RAMP}
    image = Image.fromarray(RAMP.astype(np.uint16) * 257) if mode == "I;16" else Image.fromarray(RAMP).convert(mode)
    if mode == "1":
        image = Image.fromarray(values["1"]).convert("1")
    options = {"quality": 100, "subsampling": 0} if mode == "CMYK" else {}
    seen = np.asarray(decode_image(encoded(image, "JPEG" if mode == "CMYK" else "PNG", **options))).astype(float)
    expected = on_white(values.get(mode, RAMP), 255)
    assert np.abs(seen - expected).max() <= (3 if mode == "CMYK" else 0)


@pytest.mark.parametrize("mode", ["LA", "RGBA"])
@pytest.mark.parametrize("name", ["PNG", "WEBP"])
def test_transparent_parts_are_on_white(mode: str, name: str) -> None:
    alpha = np.tile(np.linspace(0, 255, 40).astype(np.uint8), (200, 1))
    image = Image.fromarray(np.stack([RAMP, alpha], axis=2)).convert(mode)
    seen = np.asarray(decode_image(encoded(image, name, **({"lossless": True} if name == "WEBP" else {}))))
    assert np.abs(seen - on_white(RAMP, alpha)).max() <= 1


@pytest.mark.parametrize(("mode", "name"), [("1", "PNG"), ("L", "PNG"), ("P", "PNG"), ("P", "GIF"), ("I;16", "PNG")])
def test_a_colour_that_is_transparent_is_white(mode: str, name: str) -> None:
    grey = (RAMP > 127) * np.uint8(200 if mode != "1" else 255)
    image = Image.fromarray(grey.astype(np.uint16) * 257) if mode == "I;16" else Image.fromarray(grey).convert(mode)
    seen = np.asarray(decode_image(encoded(image, name, transparency=0)))
    assert np.array_equal(seen, on_white(grey, np.where(grey == 0, 0, 255)))


def test_a_colour_of_three_numbers_may_be_transparent() -> None:
    image = Image.fromarray(np.repeat(((RAMP > 127) * np.uint8(200))[..., None], 3, axis=2))
    seen = np.asarray(decode_image(encoded(image, "PNG", transparency=(200, 200, 200))))
    assert np.array_equal(seen[..., 0], np.where(RAMP > 127, 255, 0))
