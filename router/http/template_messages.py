"""Messages of a chat as a chat template gets them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.errors import InvalidRequest
from router.http.bodies.chats import Message
from router.http.json_body import parse_json


def template_message(message: Message, place: int) -> Mapping[str, Any]:
    """A message with the fields that it has; raises InvalidRequest. `place`: of the message in the chat.

    As in transformers, the arguments of a call are an object and not its JSON, so that templates write them as JSON.
    """
    message.check(place)
    found: dict[str, Any] = {"role": message.role, "content": message.content}
    for field in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, field)) is not None:
            found[field] = value
    if message.tool_calls:
        found["tool_calls"] = [
            {
                **({} if call.id is None else {"id": call.id}),
                "type": call.type,
                "function": {"name": call.function.name, "arguments": arguments_of(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    return found


def arguments_of(text: str) -> Any:
    """The object that the text is in JSON; the text itself if it is none, or larger than any body may be."""
    if not text.strip():
        return {}
    try:
        return parse_json(text.encode())
    except (InvalidRequest, UnicodeEncodeError):
        return text
