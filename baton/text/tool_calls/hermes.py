"""The formats of Hermes and Qwen, and of SmolLM2: JSON between `<tool_call>` and `</tool_call>`.

Hermes and Qwen write an object for each call, SmolLM2 a list of all calls. Both are read here, wherever they occur.
"""

from __future__ import annotations

from baton.text.tool_calls.call_parser import CallParser, Reading

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
