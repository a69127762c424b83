"""The formats of Mistral: `[TOOL_CALLS]` before a JSON list of calls, or, in newer models, before each call.

The older one is `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`, the newer one
`[TOOL_CALLS]name[ARGS]{...}`, some of whose models write `[CALL_ID]id` before `[ARGS]`; that id means nothing here.
"""

from __future__ import annotations

from baton.text.tool_calls.call_parser import CallParser, Malformed, Reading, push
from baton.text.tool_calls.json_scanner import JsonScanner

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
