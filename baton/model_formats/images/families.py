"""Families of image models: what text stands for an image of a certain size, and how many rows its encoder makes.

Each follows the processor of the family in transformers, with the same rounding of sizes, since the rows that the
encoder of a node makes must fill the positions that a router gave an image.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from baton.errors import ConfigError
from baton.model_formats.json_files import read_object

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
        whole = f"{self._around}{self._whole}{in_tile}{self._around}"
        if not rows:
            return ImageLayout(whole, self.rows_per_tile)
        lines = [
            "".join(f"{self._around}<row_{row + 1}_col_{column + 1}>{in_tile}" for column in range(columns)) + "\n"
            for row in range(rows)
        ]
        return ImageLayout("".join(lines) + "\n" + whole, self.rows_per_tile * (rows * columns + 1))

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
    found = read_object(directory / "processor_config.json").get("image_processor")
    if not isinstance(found, dict):
        raise ConfigError(f"{directory} lacks its image processor's configuration; copy preprocessor_config.json there")
    return found
