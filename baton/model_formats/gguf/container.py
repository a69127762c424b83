"""The container of a GGUF file: its metadata, and where each of its tensors lies.

Follows the specification (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), versions 2 and 3, little-endian.
Nothing in a file is trusted: a malformed one is refused with one line, before anything large is allocated. Every count
and length is compared with the bytes that are left, so that a short file cannot ask for much memory. Needs no torch, so
routers can read a file, too.
"""

from __future__ import annotations

import array
import math
import mmap
import re
import struct
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from baton.errors import ConfigError

Value: TypeAlias = "int | float | bool | str | list[Value] | array.array[int] | array.array[float]"
"""A value of the metadata. Arrays of numbers and booleans are packed, other arrays are lists."""

MAX_STRING_BYTES = 1 << 24
MAX_NESTING = 4
MAX_ARRAYS = 4096
"""Most arrays in one file, nested ones included: an empty array takes 12 bytes of a file, and more of memory."""

_STRING, _ARRAY, _BOOL = 8, 9, 7
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
"""The format characters of `struct` and `array` for each type of number; a boolean is a byte."""
_SMALLEST_STRING = 8
_SMALLEST_ARRAY = 12


class HeaderReader:
    """Reads little-endian values one after the other; raises ConfigError for what is malformed or beyond a bound."""

    def __init__(self, data: memoryview, end: int) -> None:
        """`end`: the number of bytes that the header may take at most."""
        self._data = data[:end]
        self.position = 0
        self._arrays_left = MAX_ARRAYS

    def number(self, code: str) -> int:
        """An integer of a format character of `struct`."""
        (value,) = struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))
        return int(value)

    def count(self, smallest: int, limit: int, what: str) -> int:
        """A number of things that take at least `smallest` bytes each."""
        number = self.number("Q")
        if number > limit or number * smallest > self._left:
            raise ConfigError(f"{number} {what} are more than the file can hold or than are read ({limit})")
        return number

    def string(self) -> str:
        """A string in UTF-8."""
        length = self.count(1, MAX_STRING_BYTES, "bytes of a string")
        try:
            return str(self._take(length), "utf-8")
        except UnicodeDecodeError:
            raise ConfigError(f"the string before byte {self.position} is not UTF-8") from None

    def value(self) -> Value:
        """A value with its type before it."""
        return self._value_of(self.number("I"), MAX_NESTING)

    def _value_of(self, kind: int, nesting: int) -> Value:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(nesting)
        if kind not in _NUMBERS:
            raise ConfigError(f"type {kind} of a value is unknown")
        code = "<" + _NUMBERS[kind]
        (value,) = struct.unpack(code, self._take(struct.calcsize(code)))
        return bool(value) if kind == _BOOL else value

    def _array(self, nesting: int) -> Value:
        self._arrays_left -= 1
        if not nesting or self._arrays_left < 0:
            raise ConfigError(f"arrays are nested more than {MAX_NESTING} deep, or there are more than {MAX_ARRAYS}")
        kind = self.number("I")
        if kind in _NUMBERS:
            numbers = array.array(_NUMBERS[kind])
            count = self.count(numbers.itemsize, len(self._data), "elements of an array")
            numbers.frombytes(self._take(count * numbers.itemsize))
            if sys.byteorder == "big":
                numbers.byteswap()
            return numbers
        smallest = _SMALLEST_STRING if kind == _STRING else _SMALLEST_ARRAY
        count = self.count(smallest, len(self._data), "elements of an array")
        return [self._value_of(kind, nesting - 1) for _ in range(count)]

    @property
    def _left(self) -> int:
        return len(self._data) - self.position

    def _take(self, count: int) -> memoryview:
        if count > self._left:
            raise ConfigError(f"its header ends before byte {self.position + count}")
        piece = self._data[self.position : self.position + count]
        self.position += count
        return piece


MAX_HEADER_BYTES = 1 << 26
"""Most bytes of metadata and tensor descriptions; a vocabulary of 256,000 tokens with merges takes 16 MiB."""
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 16
MAX_DIMENSIONS = 4
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_BIG_ENDIAN_3 = 3 << 24
_DEFAULT_ALIGNMENT = 32
_MAX_ALIGNMENT = 1 << 20
_SMALLEST_PAIR = 8 + 4 + 1
_SMALLEST_TENSOR = 8 + 4 + 8 + 4 + 8
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}\Z")


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """How numbers are stored: `num_elements` neighbouring ones take `num_bytes` together."""

    name: str
    num_elements: int
    num_bytes: int


BLOCK_FORMATS: Mapping[int, BlockFormat] = {
    0: BlockFormat("F32", 1, 4),
    1: BlockFormat("F16", 1, 2),
    2: BlockFormat("Q4_0", 32, 18),
    3: BlockFormat("Q4_1", 32, 20),
    6: BlockFormat("Q5_0", 32, 22),
    7: BlockFormat("Q5_1", 32, 24),
    8: BlockFormat("Q8_0", 32, 34),
    12: BlockFormat("Q4_K", 256, 144),
    13: BlockFormat("Q5_K", 256, 176),
    14: BlockFormat("Q6_K", 256, 210),
    30: BlockFormat("BF16", 1, 2),
}
"""The formats that are read, by their numbers in files (`ggml_type` of ggml.h)."""
_OTHER_FORMATS = {
    10: "Q2_K",
    11: "Q3_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    29: "IQ1_M",
    39: "MXFP4",
}
"""The names of formats in wide use that are refused."""


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """One tensor of a file: what it is, and where its bytes are."""

    name: str
    shape: tuple[int, ...]
    """Rows first, as in torch; files have the reverse order."""
    format: BlockFormat
    offset: int
    """The first byte's position in the file."""

    @property
    def num_bytes(self) -> int:
        """The number of bytes in the file."""
        return math.prod(self.shape) // self.format.num_elements * self.format.num_bytes


@dataclass(frozen=True, slots=True)
class GgufFile:
    """An open, checked GGUF file."""

    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, TensorPlace]
    _data: memoryview

    def bytes_of(self, tensor: TensorPlace) -> memoryview:
        """The bytes of a tensor, mapped from the file; valid while the file is open."""
        return self._data[tensor.offset : tensor.offset + tensor.num_bytes]


@contextmanager
def open_gguf(path: Path) -> Iterator[GgufFile]:
    """Open and check a GGUF file. The file's bytes are mapped, and none but the header's are read.

    Raises ConfigError (one line with the path) for a file that can't be opened or is malformed in any way.
    """
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # a ValueError for an empty file
        raise ConfigError(f"{path} can't be read as a GGUF file: {error}") from error
    try:
        with memoryview(mapped) as data:
            yield _checked(path, data)
    finally:
        # If a tensor is still a view of the file, the file is unmapped when the last view is gone.
        with suppress(BufferError):
            mapped.close()


def _checked(path: Path, data: memoryview) -> GgufFile:
    try:
        reader = HeaderReader(data, MAX_HEADER_BYTES)
        num_tensors, num_keys = _head(reader, data)
        metadata = _metadata(reader, num_keys)
        tensors = _tensors(reader, num_tensors, metadata, len(data))
    except ConfigError as error:
        raise ConfigError(f"{path} is not a sound GGUF file: {error}") from None
    return GgufFile(path, metadata, tensors, data)


def _head(reader: HeaderReader, data: memoryview) -> tuple[int, int]:
    """The numbers of tensors and of keys."""
    if bytes(data[:4]) != _MAGIC:
        raise ConfigError("it does not begin with GGUF")
    reader.position = 4
    version = reader.number("I")
    if version not in _VERSIONS:
        kind = "it is big-endian" if version == _BIG_ENDIAN_3 else f"version {version}"
        raise ConfigError(f"{kind}; versions 2 and 3, little-endian, are read")
    num_tensors = reader.count(_SMALLEST_TENSOR, MAX_TENSORS, "tensors")
    return num_tensors, reader.count(_SMALLEST_PAIR, MAX_KEYS, "keys")


def _metadata(reader: HeaderReader, count: int) -> Mapping[str, Value]:
    metadata: dict[str, Value] = {}
    for _ in range(count):
        key = reader.string()
        if key in metadata:
            raise ConfigError(f"key {key[:80]!r} is there twice")
        metadata[key] = reader.value()
    return metadata


def _tensors(
    reader: HeaderReader, count: int, metadata: Mapping[str, Value], file_size: int
) -> Mapping[str, TensorPlace]:
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or not 0 < alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
        raise ConfigError("general.alignment is not a power of two up to 1 MiB")
    described = [_tensor(reader, alignment) for _ in range(count)]
    first = -(-reader.position // alignment) * alignment
    end, tensors = first, dict[str, TensorPlace]()
    for name, shape, kind, offset in sorted(described, key=lambda entry: entry[3]):
        tensor = TensorPlace(name, shape, kind, first + offset)
        if name in tensors:
            raise ConfigError(f"tensor {name} is there twice")
        if tensor.offset < end:
            raise ConfigError(f"tensor {name} overlaps the one before it")
        end = tensor.offset + tensor.num_bytes
        if end > file_size:
            raise ConfigError(f"tensor {name} ends at byte {end}, and the file at {file_size}; copy it again")
        tensors[name] = tensor
    return tensors


def _tensor(reader: HeaderReader, alignment: int) -> tuple[str, tuple[int, ...], BlockFormat, int]:
    """The name, shape, format and offset (from the first tensor's place) of one tensor."""
    name = reader.string()
    if not _NAME.match(name) or ".." in name:
        raise ConfigError(f"{name[:80]!r} is not a name of a tensor")
    num_dimensions = reader.number("I")
    if not 0 < num_dimensions <= MAX_DIMENSIONS:
        raise ConfigError(f"tensor {name} has {num_dimensions} dimensions instead of 1 to {MAX_DIMENSIONS}")
    shape = tuple(reversed([reader.number("Q") for _ in range(num_dimensions)]))
    kind, offset = reader.number("I"), reader.number("Q")
    if kind not in BLOCK_FORMATS:
        known = ", ".join(known.name for known in BLOCK_FORMATS.values())
        raise ConfigError(f"tensor {name} has format {_OTHER_FORMATS.get(kind, kind)}, which is not read; use {known}")
    if not all(shape) or math.prod(shape) >= 1 << 48 or shape[-1] % BLOCK_FORMATS[kind].num_elements:
        raise ConfigError(f"tensor {name} of format {BLOCK_FORMATS[kind].name} can't have the shape {shape}")
    if offset % alignment:
        raise ConfigError(f"tensor {name} is at byte {offset}, which is not a multiple of {alignment}")
    return name, shape, BLOCK_FORMATS[kind], offset
