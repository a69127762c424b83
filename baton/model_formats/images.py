"""Encoded images, and how they appear in the prompts of models: in which text, and as how many rows. No pixels.

Each family of models follows its processor in transformers, with the same rounding of sizes, since the rows that the
encoder of a node makes must fill the positions that a router gave an image. The size of an image is read from its
header before anything is decoded; the formats are those of OpenAI's API.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from baton.errors import ConfigError
from baton.model_formats.files import read_object

if TYPE_CHECKING:
    from PIL.Image import Image

_LARGEST_SIDE = 1 << 16
"""The most pixels or patches in a row that a processor's configuration may name."""
_MOST_TOKENS = 1 << 20


class UnusableImage(ValueError):
    """An image that the model's processor does not take; the message says why."""


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """An image in a prompt."""

    text: str
    """What replaces the image's placeholder in the prompt: the family's image token once for each row, and more."""
    num_rows: int
    """Number of image tokens, whose embeddings the encoder's rows replace."""
    grid: tuple[int, int] | None = None
    """Rows and columns of the image tokens, if their rotary positions are those of a grid (M-RoPE)."""


class ImageFamily(Protocol):
    """The rules of one model for its images. They need an image's size alone."""

    @property
    def image_token(self) -> str:
        """The token that stands for one row of an image, and once in a template for a whole image."""
        ...

    def layout(self, width: int, height: int) -> ImageLayout:
        """The layout of an image of so many pixels. Raises UnusableImage."""
        ...


@dataclass(frozen=True, slots=True)
class Idefics3Images:
    """Idefics3 and SmolVLM: an image is cut into square tiles, and a small copy of the whole image follows them.

    See Idefics3ImageProcessor and Idefics3Processor in transformers.
    """

    rows_per_tile: int
    tile: int
    """Pixels of a tile's side."""
    longest_edge: int
    """The longer side is resized to so many pixels before the image is cut."""
    is_cut: bool
    image_token: str = "<image>"
    _around: str = "<fake_token_around_image>"
    _whole: str = "<global-img>"

    def layout(self, width: int, height: int) -> ImageLayout:
        """The layout of an image of so many pixels."""
        rows, columns = self._tiles(width, height)
        in_tile = self.image_token * self.rows_per_tile
        overview = f"{self._around}{self._whole}{in_tile}{self._around}"
        if not rows:
            return ImageLayout(overview, self.rows_per_tile)
        lines = [
            "".join(f"{self._around}<row_{row + 1}_col_{column + 1}>{in_tile}" for column in range(columns)) + "\n"
            for row in range(rows)
        ]
        return ImageLayout("".join(lines) + "\n" + overview, self.rows_per_tile * (rows * columns + 1))

    def _tiles(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of the tiles; none for an image that is not cut."""
        if not self.is_cut:
            return 0, 0
        width, height = _with_longest_edge(width, height, self.longest_edge)
        aspect = width / height
        if width >= height:
            width = _multiple(width, self.tile)
            height = _multiple(int(width / aspect), self.tile)
        else:
            height = _multiple(height, self.tile)
            width = _multiple(int(height * aspect), self.tile)
        if max(width, height) <= self.tile:
            return 0, 0
        return height // self.tile, width // self.tile


_LARGEST_IDEFICS3_SIDE = 4096


def _with_longest_edge(width: int, height: int, longest: int) -> tuple[int, int]:
    """The size of an image whose longer side is resized; the shorter one is even, and no side above 4,096."""
    aspect = width / height
    if width >= height:
        width, height = longest, int(longest / aspect)
        height += height % 2
    else:
        width, height = int(longest * aspect), longest
        width += width % 2
    width, height = max(width, 1), max(height, 1)
    aspect = width / height
    if width >= height and width > _LARGEST_IDEFICS3_SIDE:
        width, height = _LARGEST_IDEFICS3_SIDE, int(_LARGEST_IDEFICS3_SIDE / aspect)
    elif height > width and height > _LARGEST_IDEFICS3_SIDE:
        width, height = int(_LARGEST_IDEFICS3_SIDE * aspect), _LARGEST_IDEFICS3_SIDE
    return max(width, 1), max(height, 1)


def _multiple(size: int, of: int) -> int:
    return math.ceil(size / of) * of


_MOST_SLENDER = 200
"""The largest ratio of an image's sides that the processor of Qwen2-VL takes."""


@dataclass(frozen=True, slots=True)
class Qwen2VLImages:
    """Qwen2-VL and Qwen2.5-VL: one row for a square of merged patches, and positions in a grid (M-RoPE).

    See `smart_resize` in transformers' Qwen2VLImageProcessor.
    """

    patch: int
    """Pixels of a patch's side."""
    merge: int
    """Patches of a merged square's side."""
    least_pixels: int
    most_pixels: int
    image_token: str = "<|image_pad|>"

    def layout(self, width: int, height: int) -> ImageLayout:
        """The layout of an image of so many pixels. Raises UnusableImage for one that is too slender."""
        if max(width, height) > _MOST_SLENDER * min(width, height):
            raise UnusableImage(f"its longer side is more than {_MOST_SLENDER} times the shorter one")
        side = self.patch * self.merge
        rows, columns = round(height / side), round(width / side)
        if rows * columns * side * side > self.most_pixels:
            shrink = math.sqrt(height * width / self.most_pixels)
            rows = max(1, math.floor(height / shrink / side))
            columns = max(1, math.floor(width / shrink / side))
        elif rows * columns * side * side < self.least_pixels:
            grow = math.sqrt(self.least_pixels / (height * width))
            rows, columns = math.ceil(height * grow / side), math.ceil(width * grow / side)
        return ImageLayout(self.image_token * (rows * columns), rows * columns, (rows, columns))


def _idefics3(numbers: _Numbers) -> ImageFamily:
    config, processor = numbers.config, numbers.processor
    vision = config.get("vision_config") or {}
    patches = numbers.count(vision, "image_size", 224) // numbers.count(vision, "patch_size", 32)
    is_cut = processor.get("do_image_splitting", True)
    rows = patches * patches // numbers.count(config, "scale_factor", 2) ** 2
    if not 0 < rows <= _MOST_TOKENS:
        raise numbers.wrong("scale_factor")
    tile = numbers.count(processor.get("max_image_size") or {}, "longest_edge", 364)
    longest = numbers.count(processor.get("size") or {}, "longest_edge", 4 * 364)
    return Idefics3Images(rows, tile, longest, bool(is_cut))


def _qwen2_vl(numbers: _Numbers) -> ImageFamily:
    processor = numbers.processor
    size = processor.get("size") or {}
    most = _LARGEST_SIDE * _LARGEST_SIDE
    least_pixels = numbers.count(size, "shortest_edge", 56 * 56, most)
    most_pixels = numbers.count(size, "longest_edge", 28 * 28 * 1280, most)
    return Qwen2VLImages(
        numbers.count(processor, "patch_size", 14),
        numbers.count(processor, "merge_size", 2),
        numbers.count(processor, "min_pixels", least_pixels, most),
        numbers.count(processor, "max_pixels", most_pixels, most),
    )


IMAGE_FAMILIES: Mapping[str, Callable[[_Numbers], ImageFamily]] = {
    "idefics3": _idefics3,
    "smolvlm": _idefics3,
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_vl,
}
"""What makes a model's rules, by the `model_type` in its config.json."""


@dataclass(frozen=True, slots=True)
class _Numbers:
    """The configurations of a model and of its image processor."""

    config: Mapping[str, Any]
    processor: Mapping[str, Any]
    directory: Path

    def count(self, found_in: Mapping[str, Any], name: str, default: int, most: int = _LARGEST_SIDE) -> int:
        """A whole number from 1 on. Raises ConfigError for anything else."""
        value = found_in.get(name)
        if value is None:
            return default
        if type(value) is not int or not 0 < value <= most:
            raise self.wrong(name)
        return value

    def wrong(self, name: str) -> ConfigError:
        return ConfigError(f"{self.directory} has an unusable {name} for images in its configuration; copy it again")


def image_family(directory: Path) -> ImageFamily | None:
    """The rules of the model in a directory for its images; None for a model that takes none.

    Reads config.json, and preprocessor_config.json or processor_config.json. Raises ConfigError.
    """
    config = read_object(directory / "config.json")
    make = IMAGE_FAMILIES.get(str(config.get("model_type")))
    return None if make is None else make(_Numbers(config, read_processor(directory), directory))


def read_processor(directory: Path) -> Mapping[str, Any]:
    """The configuration of a model's image processor, which newer releases of transformers keep among others.

    Raises ConfigError for a directory without one.
    """
    if (path := directory / "preprocessor_config.json").is_file():
        return read_object(path)
    processor = read_object(directory / "processor_config.json").get("image_processor")
    if not isinstance(processor, dict):
        raise ConfigError(f"{directory} lacks its image processor's configuration; copy preprocessor_config.json there")
    return processor


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
        orientation = exif.get(_ORIENTATION)
    # Pillow has no list of what its reader of EXIF raises.
    except Exception:
        return 1
    return orientation if isinstance(orientation, int) and 1 <= orientation <= 8 else 1
