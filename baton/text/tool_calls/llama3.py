"""The format of Llama 3: `{"name": ..., "parameters": {...}}`, behind `<|python_tag|>` or as the whole answer.

An object without the tag is a call only at the beginning of the answer, and only if it names a tool of the request:
otherwise it is JSON that the user asked for. Several calls are separated by semicolons or by white space.
"""

from __future__ import annotations

from baton.text.tool_calls.call_parser import END, CallParser, Reading

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
                if char == END:
                    self._end_marker()
            elif char != "{":
                return char
            if char == END:
                return char
