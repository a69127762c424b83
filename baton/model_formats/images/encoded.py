"""The size of an encoded image, from its header, before anything is decoded. The formats are those of OpenAI's API."""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.model_formats.images.families import UnusableImage

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_ORIENTATION = 0x0112
_TURNED = (5, 6, 7, 8)
"""Values of EXIF's Orientation with which width and height change places (Exif 2.32, 4.6.4)."""
_HEAD_BYTES = 256 << 10
"""In so many bytes the header of a PNG or JPEG must end: Pillow reads it piece by piece, in Python."""
_PNG, _JPEG = b"\x89PNG\r\n\x1a\n", b"\xff\xd8"
_SCAN = b"\xff\xda"
_MOST_SCANS = 64
"""The most scans of a JPEG: a progressive one has about ten, and each is a pass over all its pixels."""


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Bounds of one image."""

    most_bytes: int
    """Bytes of the encoded image."""
    most_pixels: int
    """Pixels of the decoded image: 4 bytes each while it is decoded, and 3 afterwards."""


def image_size(data: bytes, limits: ImageLimits) -> tuple[int, int]:
    """Width and height of an image, as it is to be shown. Raises UnusableImage for one that is not to be decoded."""
    if len(data) > limits.most_bytes:
        raise UnusableImage(f"it has {len(data)} bytes; at most {limits.most_bytes} are taken")
    if data.startswith(_JPEG) and data.count(_SCAN) > _MOST_SCANS:
        raise UnusableImage(f"it is a JPEG of more than {_MOST_SCANS} scans")
    # The formats of whole files are read by libraries in C.
    is_read_by_python = data.startswith((_PNG, _JPEG))
    with open_image(data[:_HEAD_BYTES] if is_read_by_python else data) as image:
        width, height = image.size
        if not 0 < width * height <= limits.most_pixels:
            raise UnusableImage(f"it has {width} x {height} pixels; at most {limits.most_pixels} are taken")
        return (height, width) if orientation_of(image) in _TURNED else (width, height)


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


def orientation_of(image: Image) -> int:
    """How an image is to be turned, as EXIF in its header says: 1 to 8; 1: not at all.

    `Image.getexif` is no help: for a PNG it decodes the image.
    """
    from PIL import Image

    data = image.info.get("exif")
    if not isinstance(data, bytes):
        return 1
    exif = Image.Exif()
    try:
        exif.load(data)
        found = exif.get(_ORIENTATION)
    # Pillow has no list of what its reader of EXIF raises.
    except Exception:
        return 1
    return found if isinstance(found, int) and 1 <= found <= 8 else 1
