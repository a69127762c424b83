"""What renders the messages of a chat into the text of its prompt, and what it has a place for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

from baton.errors import InvalidRequest

_PROBE = "baton_probe"
_ANY_TIME = datetime(2024, 1, 1)
_USER: Mapping[str, Any] = {"role": "user", "content": "x"}
_ASSISTANT = {"role": "assistant", "content": "x"}
_CALL = {"id": "probe0001", "type": "function", "function": {"name": _PROBE, "arguments": {}}}
_CALLED: Sequence[Mapping[str, Any]] = [
    _USER,
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "probe0001", "content": "x"},
]
_TOOL = {
    "type": "function",
    "function": {"name": _PROBE, "description": "x", "parameters": {"type": "object", "properties": {}}},
}


class PromptTemplate(ABC):
    """A chat template. What it has a place for is found by rendering chats of one word and looking for that word."""

    @abstractmethod
    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        now: datetime,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """The prompt's text, special tokens included; raises InvalidRequest for messages that the template rejects.

        `variables`: further variables for the template, such as `enable_thinking`. `tools`: those that the model may
        call, each as `{"type": "function", "function": {...}}`. `continue_final_message`: the text ends within the last
        message, which the model then continues, as in transformers.
        """

    @cached_property
    def needs_parts(self) -> bool:
        """Whether the text of a message is rendered only as a part in a list, as by templates of some image models."""
        text = [{**_USER, "content": _PROBE}]
        return not self._has_probe(text) and self._has_probe(with_parts(text))

    @cached_property
    def shows_tools(self) -> bool:
        """Whether tools are part of the prompt."""
        return any(self._shows(chat, [_TOOL]) for chat in ([_USER], [{**_USER, "role": "system"}, _USER]))

    @cached_property
    def shows_calls(self) -> bool:
        """Whether calls in messages of the assistant are part of the prompt of a chat without tools."""
        return any(self._shows(chat) for chat in (_CALLED, [*_CALLED, _ASSISTANT, _USER]))

    @cached_property
    def shows_system(self) -> bool:
        """Whether messages of the role system are part of the prompt."""
        return self._shows([{"role": "system", "content": _PROBE}, _USER])

    def _shows(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> bool:
        """Whether the word is in what is made of these messages, as texts or as parts; not if both are refused."""
        return self._has_probe(messages, tools) or self._has_probe(with_parts(messages), tools)

    def _has_probe(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> bool:
        try:
            return _PROBE in self.render(messages, _ANY_TIME, None, tools)
        except InvalidRequest:
            return False


def with_parts(messages: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Messages whose contents are all lists of parts, as some templates of models that take images need them."""
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message["content"], str)
        else message
        for message in messages
    ]
