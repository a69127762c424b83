"""Reads the values of a GGUF header from bytes that nobody has checked yet.

Every count and length is compared with the bytes that are left before anything is allocated for it, so that a short
file cannot ask for much memory.
"""

from __future__ import annotations

import array
import struct
import sys
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
        found = self.number("Q")
        if found > limit or found * smallest > self._left:
            raise ConfigError(f"{found} {what} are more than the file can hold or than are read ({limit})")
        return found

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
