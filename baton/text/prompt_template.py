"""What renders the messages of a chat into the text of its prompt, and what it has a place for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
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


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """What a chat template has a place for."""

    needs_parts: bool
    """Whether the text of a message is rendered only as a part in a list, as by templates of some image models."""
    shows_tools: bool
    """Whether tools are part of the prompt."""
    shows_calls: bool
    """Whether calls in messages of the assistant are part of the prompt of a chat without tools."""
    shows_system: bool
    """Whether messages of the role system are part of the prompt."""


class PromptTemplate(ABC):
    """A chat template."""

    @property
    @abstractmethod
    def traits(self) -> TemplateTraits:
        """What the template has a place for. Raises what `render` raises for a template that can't be rendered."""

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


def find_traits(render: Callable[..., str]) -> TemplateTraits:
    """Find the traits of a template by rendering chats of one word with `PromptTemplate.render`."""

    def has_probe(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> bool:
        try:
            return _PROBE in render(messages, _ANY_TIME, None, tools)
        except InvalidRequest:
            return False

    def shows(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> bool:
        """Whether the word is in what is made of these messages, as texts or as parts; not if both are refused."""
        return has_probe(messages, tools) or has_probe(with_parts(messages), tools)

    text = [{**_USER, "content": _PROBE}]
    return TemplateTraits(
        needs_parts=not has_probe(text) and has_probe(with_parts(text)),
        shows_tools=any(shows(chat, [_TOOL]) for chat in ([_USER], [{**_USER, "role": "system"}, _USER])),
        shows_calls=any(shows(chat) for chat in (_CALLED, [*_CALLED, _ASSISTANT, _USER])),
        shows_system=shows([{"role": "system", "content": _PROBE}, _USER]),
    )


def with_parts(messages: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Messages whose contents are all lists of parts, as some templates of models that take images need them."""
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message["content"], str)
        else message
        for message in messages
    ]
