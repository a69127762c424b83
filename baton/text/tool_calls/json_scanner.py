"""Reads one JSON value character by character, in bounded memory (RFC 8259)."""

from __future__ import annotations

import re
from enum import Enum, auto

MAX_DEPTH = 64
"""The deepest nesting of objects and arrays."""
_MAX_SCALAR_CHARS = 400
_SPACES = " \t\n\r"
_LITERALS = ("true", "false", "null")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?\Z")
_SCALAR_CHARS = frozenset("0123456789+-.eEtrufalsn")


class NotJson(ValueError):
    """The character can't follow those before it."""


class Kind(Enum):
    """What a character is part of."""

    SPACE = auto()
    OPEN = auto()
    """The beginning of an object or array."""
    CLOSE = auto()
    """The end of an object or array."""
    KEY = auto()
    """A key, its quotes included."""
    STRING = auto()
    """A string that is a value, its quotes included."""
    CONTROL = auto()
    """A control character in a string. JSON demands an escape for it, and models forget that, so it is accepted."""
    SCALAR = auto()
    """A number, true, false or null."""
    SEPARATOR = auto()
    """A comma or a colon."""


class _Expects(Enum):
    VALUE = auto()
    VALUE_OR_END = auto()
    KEY = auto()
    KEY_OR_END = auto()
    COLON = auto()
    COMMA_OR_END = auto()
    NOTHING = auto()


class JsonScanner:
    """Says of each character of an object or array what it is part of."""

    __slots__ = ("_escape", "_expects", "_is_key", "_is_string", "_scalar", "_stack")

    def __init__(self) -> None:
        self._stack: list[str] = []
        self._expects = _Expects.VALUE
        self._is_string = False
        self._is_key = False
        self._escape = -1
        """Hexadecimal digits that an escape still needs; 0: the character behind a backslash; -1: no escape."""
        self._scalar = ""

    @property
    def depth(self) -> int:
        """Number of objects and arrays that are open."""
        return len(self._stack)

    @property
    def is_done(self) -> bool:
        """Whether the value is complete."""
        return self._expects is _Expects.NOTHING

    @property
    def is_in_string(self) -> bool:
        """Whether a string is open."""
        return self._is_string

    def push(self, char: str) -> Kind:
        """Take the next character; raises NotJson. A value that is no object or array is not JSON here."""
        if self._is_string:
            return self._in_string(char)
        if self._scalar:
            if char in _SCALAR_CHARS and len(self._scalar) < _MAX_SCALAR_CHARS:
                self._scalar += char
                return Kind.SCALAR
            self._end_scalar()
        if char in _SPACES:
            return Kind.SPACE
        match self._expects:
            case _Expects.VALUE | _Expects.VALUE_OR_END:
                return self._value(char)
            case _Expects.KEY | _Expects.KEY_OR_END if char == '"':
                self._is_string = self._is_key = True
                return Kind.KEY
            case _Expects.KEY_OR_END if char == "}":
                return self._close()
            case _Expects.COLON if char == ":":
                self._expects = _Expects.VALUE
                return Kind.SEPARATOR
            case _Expects.COMMA_OR_END if char == ",":
                self._expects = _Expects.KEY if self._stack[-1] == "}" else _Expects.VALUE
                return Kind.SEPARATOR
            case _Expects.COMMA_OR_END if char == self._stack[-1]:
                return self._close()
        raise NotJson(char)

    def _value(self, char: str) -> Kind:
        if char in "{[":
            if len(self._stack) == MAX_DEPTH:
                raise NotJson(char)
            self._stack.append("}" if char == "{" else "]")
            self._expects = _Expects.KEY_OR_END if char == "{" else _Expects.VALUE_OR_END
            return Kind.OPEN
        if char == "]" and self._expects is _Expects.VALUE_OR_END:
            return self._close()
        if not self._stack:
            raise NotJson(char)
        if char == '"':
            self._is_string, self._is_key = True, False
            return Kind.STRING
        if char in _SCALAR_CHARS:
            self._scalar = char
            return Kind.SCALAR
        raise NotJson(char)

    def _in_string(self, char: str) -> Kind:
        kind = Kind.KEY if self._is_key else Kind.STRING
        if self._escape > 0:
            if char not in "0123456789abcdefABCDEF":
                raise NotJson(char)
            self._escape -= 1
            if self._escape == 0:
                self._escape = -1
        elif self._escape == 0:
            if char not in '"\\/bfnrtu':
                raise NotJson(char)
            self._escape = 4 if char == "u" else -1
        elif char == "\\":
            self._escape = 0
        elif char == '"':
            self._is_string = False
            self._expects = _Expects.COLON if self._is_key else _Expects.COMMA_OR_END
        elif char < " ":
            return Kind.CONTROL
        return kind

    def _end_scalar(self) -> None:
        if self._scalar not in _LITERALS and not _NUMBER.match(self._scalar):
            raise NotJson(self._scalar)
        self._scalar = ""
        self._expects = _Expects.COMMA_OR_END

    def _close(self) -> Kind:
        self._stack.pop()
        self._expects = _Expects.COMMA_OR_END if self._stack else _Expects.NOTHING
        return Kind.CLOSE
