"""The size of an encoded image, from its header: nothing is decoded. The formats are those of OpenAI's API."""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.model_formats.images.families import UnusableImage

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_TURNED = (5, 6, 7, 8)
"""Values of EXIF's Orientation with which width and height change places (Exif 2.32, 4.6.4)."""
_ORIENTATION = 0x0112


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Bounds of one image."""

    most_bytes: int = 8 << 20
    """Bytes of the encoded image."""
    most_pixels: int = 16 << 20
    """Pixels of the decoded image: 4 bytes each while it is decoded, and 3 afterwards."""


def image_size(data: bytes, limits: ImageLimits) -> tuple[int, int]:
    """Width and height of an image, as it is to be shown. Raises UnusableImage for one that is not to be decoded."""
    if len(data) > limits.most_bytes:
        raise UnusableImage(f"it has {len(data)} bytes; at most {limits.most_bytes} are taken")
    with open_image(data) as image:
        width, height = image.size
        if not 0 < width * height <= limits.most_pixels:
            raise UnusableImage(f"it has {width} x {height} pixels; at most {limits.most_pixels} are taken")
        try:
            is_turned = image.getexif().get(_ORIENTATION) in _TURNED
        # Pillow has no list of what its readers of EXIF raise.
        except Exception:
            is_turned = False
    return (height, width) if is_turned else (width, height)


def open_image(data: bytes) -> Image:
    """An image whose header was read; its pixels are decoded when they are asked for. Raises UnusableImage."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            # Pillow warns of many pixels, which are counted here.
            warnings.simplefilter("ignore")
            return Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise UnusableImage("it has more pixels than are taken") from error
    # Pillow has no list of what its readers of headers raise.
    except Exception as error:
        raise UnusableImage(f"it is no image in {', '.join(FORMATS)}, or is damaged") from error
