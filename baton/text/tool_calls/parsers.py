"""The parsers of the formats in which models call tools.

Hermes and Qwen write JSON between `<tool_call>` and `</tool_call>`, an object for each call; SmolLM2 writes a list of
all calls there. Both are read, wherever they occur.

Llama 3 writes `{"name": ..., "parameters": {...}}`, behind `<|python_tag|>` or as the whole answer. An object without
the tag is a call only at the beginning of the answer, and only if it names a tool of the request: otherwise it is JSON
that the user asked for. Several calls are separated by semicolons or by white space.

Mistral's older format is `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`, the newer one, before each call,
`[TOOL_CALLS]name[ARGS]{...}`, some of whose models write `[CALL_ID]id` before `[ARGS]`; that id means nothing here.
"""

from __future__ import annotations

from baton.text.tool_calls.call_parser import END as TEXT_END
from baton.text.tool_calls.call_parser import CallParser, Malformed, Reading, push
from baton.text.tool_calls.json_scanner import JsonScanner

BEGIN = "<tool_call>"
END = "</tool_call>"


class HermesParser(CallParser):
    """Reads `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, and lists of such objects."""

    marker = BEGIN

    def _calls(self, char: str) -> Reading:
        char = yield from self._literal(char, BEGIN)
        char = yield from self._spaces(char)
        char = yield from (self._objects(char) if char == "[" else self._object(char))
        char = yield from self._spaces(char)
        return (yield from self._closing(char, END))


TAG = "<|python_tag|>"


class Llama3Parser(CallParser):
    """Reads objects with a name and with parameters."""

    marker = TAG
    argument_keys = ("parameters", "arguments")

    def _may_begin(self, char: str) -> bool:
        return char == TAG[0] or (char == "{" and self._is_empty)

    def _is_name(self, name: str) -> bool:
        return name in self._names

    def _calls(self, char: str) -> Reading:
        if char == TAG[0]:
            char = yield from self._literal(char, TAG)
            char = yield from self._spaces(char)
        while True:
            char = yield from self._object(char)
            char = yield from self._spaces(char)
            if char == ";":
                self._hold(char)
                char = yield
                char = yield from self._spaces(char)
                if char == TEXT_END:
                    self._end_marker()
            elif char != "{":
                return char
            if char == TEXT_END:
                return char


CALLS = "[TOOL_CALLS]"
ARGUMENTS = "[ARGS]"
CALL_ID = "[CALL_ID]"
_MAX_ID_CHARS = 64


class MistralParser(CallParser):
    """Reads what follows `[TOOL_CALLS]`."""

    marker = CALLS

    def _calls(self, char: str) -> Reading:
        char = yield from self._literal(char, CALLS)
        char = yield from self._spaces(char)
        return (yield from (self._objects(char) if char == "[" else self._named(char)))

    def _named(self, char: str) -> Reading:
        """Read a name and its arguments; the marker between them may be missing."""
        begin = len(self._held)
        while char.isalnum() or char in ("_", "-"):
            self._hold(char)
            char = yield
        name = self._held[begin:]
        if not self._is_name(name):
            raise Malformed(char)
        if char == "[":
            char = yield from self._markers(char)
        char = yield from self._spaces(char)
        scanner = JsonScanner()
        if char != "{" or self._num_calls == self._max_calls:
            raise Malformed(char)
        push(scanner, char)
        self._begin_call(name)
        return (yield from self._streamed(scanner))

    def _markers(self, char: str) -> Reading:
        self._hold(char)
        char = yield
        if char == CALL_ID[1]:
            char = yield from self._literal(char, CALL_ID[1:])
            num_chars = 0
            while char.isalnum() and num_chars < _MAX_ID_CHARS:
                self._hold(char)
                char = yield
                num_chars += 1
            char = yield from self._literal(char, ARGUMENTS[:1])
        return (yield from self._literal(char, ARGUMENTS[1:]))
