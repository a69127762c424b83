"""The items of a conversation in OpenAI's API of responses, and the messages that a chat template makes of them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from baton.errors import InvalidRequest
from baton.messages.request_limits import MAX_TOOLS
from router.http.bodies.content_parts import ImagePart
from router.http.template_messages import TemplateMessage, arguments_of, template_call

_ITEM_BYTES = 512
"""What an item takes in memory beside its texts, at most."""
_TEXT_BYTES = 8
"""A reference to a text."""
_IMAGE_BYTES = 256
"""What an image takes beside its data, at most."""


@dataclass(frozen=True, slots=True)
class Item:
    """One item of a conversation."""

    prefix: ClassVar[str]
    """The beginning of the ids of such items."""
    id: str
    parts: tuple[str | ImagePart, ...]
    """The texts and the images in it; only messages have images."""

    @property
    def texts(self) -> Sequence[str]:
        """The parts that are text."""
        return [part for part in self.parts if isinstance(part, str)]

    @property
    def text(self) -> str:
        """The text of all parts; they are joined by newlines, as are the parts of a chat's message."""
        return "\n".join(self.texts)

    @property
    def images(self) -> Sequence[ImagePart]:
        """The parts that are images."""
        return [part for part in self.parts if isinstance(part, ImagePart)]

    @property
    def num_bytes(self) -> int:
        """The memory that the item takes, at most, in bytes."""
        texts = sum(sys.getsizeof(text) + _TEXT_BYTES for text in (*self.texts, *self._words()))
        return _ITEM_BYTES + texts + sum(_IMAGE_BYTES + len(image.data) for image in self.images)

    @property
    def num_text_bytes(self) -> int:
        """The length of its texts in UTF-8."""
        return sum(len(text.encode(errors="surrogatepass")) for text in self.texts)

    def as_object(self, *, with_images: bool = False) -> dict[str, Any]:
        """The item as OpenAI's object, whose images have no data unless `with_images`."""
        raise NotImplementedError

    def _words(self) -> Sequence[str]:
        """Further texts that the item has from its client."""
        return ()

    def _parts(self, kind: str, **more: object) -> list[dict[str, Any]]:
        return [{"type": kind, "text": text, **more} for text in self.texts]


@dataclass(frozen=True, slots=True)
class MessageItem(Item):
    """A message."""

    prefix = "msg"
    role: str
    status: str = "completed"

    def as_object(self, *, with_images: bool = False) -> dict[str, Any]:
        if self.role == "assistant":
            content = self._parts("output_text", annotations=[])
        else:
            content = [
                {"type": "input_text", "text": part}
                if isinstance(part, str)
                else {"type": "input_image", "detail": "auto", "image_url": part.as_url() if with_images else None}
                for part in self.parts
            ]
        return {"id": self.id, "type": "message", "role": self.role, "status": self.status, "content": content}


@dataclass(frozen=True, slots=True)
class ReasoningItem(Item):
    """The reasoning before an answer."""

    prefix = "rs"
    status: str = "completed"

    def as_object(self, *, with_images: bool = False) -> dict[str, Any]:
        content = self._parts("reasoning_text")
        return {"id": self.id, "type": "reasoning", "status": self.status, "summary": [], "content": content}


@dataclass(frozen=True, slots=True)
class CallItem(Item):
    """A call of a function; its text are the arguments, as the model wrote them."""

    prefix = "fc"
    call_id: str
    name: str
    status: str = "completed"

    def as_object(self, *, with_images: bool = False) -> dict[str, Any]:
        called = {"call_id": self.call_id, "name": self.name, "arguments": self.text}
        return {"id": self.id, "type": "function_call", "status": self.status, **called}

    def _words(self) -> Sequence[str]:
        return self.call_id, self.name


@dataclass(frozen=True, slots=True)
class CallOutputItem(Item):
    """What a called function returned."""

    prefix = "fco"
    call_id: str

    def as_object(self, *, with_images: bool = False) -> dict[str, Any]:
        returned = {"call_id": self.call_id, "output": self.text}
        return {"id": self.id, "type": "function_call_output", "status": "completed", **returned}

    def _words(self) -> Sequence[str]:
        return (self.call_id,)


def template_messages(instructions: str | None, items: Sequence[Item]) -> Sequence[Mapping[str, Any]]:
    """The messages for the model's template; raises InvalidRequest for the output of a call that is not among `items`,
    and for a message with too many calls.

    Reasoning, messages of the assistant and calls that follow each other are one message, as the model wrote them.
    """
    messages = [TemplateMessage("system", [instructions])] if instructions else []
    call_ids: set[str] = set()
    for item in items:
        if not messages or not _belongs(item, messages[-1]):
            messages.append(TemplateMessage("assistant"))
        message = messages[-1]
        match item:
            case MessageItem():
                message.role = item.role
                message.texts += item.parts or [""]
            case ReasoningItem():
                message.reasoning.append(item.text)
            case CallItem():
                call_ids.add(item.call_id)
                if len(message.calls) == MAX_TOOLS:
                    raise InvalidRequest("input", f"has more than {MAX_TOOLS} calls that follow each other")
                message.calls.append(template_call(item.call_id, item.name, arguments_of(item.text)))
            case CallOutputItem():
                if item.call_id not in call_ids:
                    reason = f"has the output of the call {item.call_id[:80]!r}, which is not in the conversation"
                    raise InvalidRequest("input", reason)
                message.role, message.call_id = "tool", item.call_id
                message.texts.append(item.text)
    return [message.as_message() for message in messages]


def _belongs(item: Item, message: TemplateMessage) -> bool:
    """Whether the item is a part of the message before it: of the assistant, with parts in the order of the model.

    A message behind calls is of the same message, since calls of an earlier one would have outputs before it.
    """
    if message.role != "assistant":
        return False
    match item:
        case ReasoningItem():
            return not (message.texts or message.calls)
        case MessageItem():
            return item.role == "assistant" and bool(message.calls or not message.texts)
        case _:
            return isinstance(item, CallItem)
