"""Messages as a chat template gets them, in all APIs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.errors import InvalidRequest
from router.http.bodies.chats import Message
from router.http.bodies.content_parts import ImagePart
from router.http.json_body import parse_json


@dataclass(slots=True)
class TemplateMessage:
    """A message for the template, which may be made of several parts of a conversation."""

    role: str
    texts: list[str | ImagePart] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[Mapping[str, Any]] = field(default_factory=list)
    call_id: str | None = None
    """The call whose result the message is."""
    name: str | None = None
    """The name of its author."""

    def as_message(self) -> dict[str, Any]:
        """The message, with the fields that it has. Parts are joined by newlines, as are those of a chat's message."""
        message: dict[str, Any] = {"role": self.role, "content": _for_template(self.texts)}
        if self.name is not None:
            message["name"] = self.name
        if self.call_id is not None:
            message["tool_call_id"] = self.call_id
        if self.reasoning:
            message["reasoning_content"] = "\n".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = self.calls
        return message


def _for_template(parts: Sequence[str | ImagePart]) -> str | list[dict[str, str]]:
    """The content as a text, or as parts where there is an image: templates of models that take images know both."""
    if all(isinstance(part, str) for part in parts):
        return "\n".join(part for part in parts if isinstance(part, str))
    return [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in parts]


def template_call(call_id: str | None, name: str, arguments: Any) -> Mapping[str, Any]:
    """A call in a message.

    As in transformers, the arguments are an object and not its JSON, so that templates write them as JSON.
    """
    named = {} if call_id is None else {"id": call_id}
    return {**named, "type": "function", "function": {"name": name, "arguments": arguments}}


def arguments_of(text: str) -> Any:
    """The JSON object in a text, or {} for an empty one.

    The text itself if it holds no such object, or a larger one than a body may have.
    """
    if not text.strip():
        return {}
    try:
        return parse_json(text.encode())
    except (InvalidRequest, UnicodeEncodeError):
        return text


def template_message(message: Message, place: int) -> Mapping[str, Any]:
    """A message of a chat; raises InvalidRequest. `place`: of the message in the chat."""
    message.check(place)
    calls = [
        template_call(call.id, call.function.name, arguments_of(call.function.arguments))
        for call in message.tool_calls or ()
    ]
    reasoning = [] if message.given_reasoning is None else [message.given_reasoning]
    content = message.content
    texts: list[str | ImagePart] = [content] if isinstance(content, str) else list(content)
    made = TemplateMessage(message.role, texts, reasoning, calls, message.tool_call_id, message.name)
    return made.as_message()
