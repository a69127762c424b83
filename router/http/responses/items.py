"""The items of a conversation in OpenAI's API of responses: as clients send them, as they are kept, and as messages."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PlainValidator

from baton.errors import InvalidRequest
from baton.messages.request_limits import MAX_MESSAGES, MAX_TOOLS
from router.http.bodies.content_parts import (
    ImagePart,
    TemplateMessage,
    arguments_of,
    check_detail,
    image_of_url,
    template_call,
)
from router.http.bodies.fields import Bounded, NotServed, OnlyFalse, Strict, note_ignored, read_part
from router.http.bodies.tools import CallId, ToolName

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


_ROLES = ("user", "assistant", "system", "developer")
_ITEM_FIELDS = {"type", "id", "role", "status", "content", "phase"}
_PART_FIELDS = {"type", "text", "annotations", "logprobs"}
_IMAGE_FIELDS = {"type", "image_url", "detail"}
_Status = Literal["in_progress", "completed", "incomplete"]


class FunctionCall(Strict):
    """A call that the model made."""

    type: Literal["function_call"]
    id: str | None = None
    call_id: CallId
    name: ToolName
    arguments: str
    status: _Status | None = None
    async_: OnlyFalse = Field(None, alias="async")
    caller: NotServed = None
    namespace: NotServed = None

    def as_item(self) -> CallItem:
        """The item, which has no id yet."""
        return CallItem("", (self.arguments,), self.call_id, self.name, self.status or "completed")


def _output(value: Any) -> tuple[str, ...]:
    if not isinstance(value, str | list):
        raise ValueError("must be a string or a list of text parts")
    return _texts(value)


class FunctionCallOutput(Strict):
    """What a called function returned."""

    type: Literal["function_call_output"]
    id: str | None = None
    call_id: CallId
    output: Annotated[tuple[str, ...], PlainValidator(_output, json_schema_input_type=str | list[dict[str, str]])]
    status: _Status | None = None
    caller: NotServed = None
    name: NotServed = None
    namespace: NotServed = None

    def as_item(self) -> CallOutputItem:
        """The item, which has no id yet."""
        return CallOutputItem("", self.output, self.call_id)


class ReasoningText(Strict):
    """A part of reasoning."""

    type: Literal["reasoning_text"]
    text: str


class SummaryText(Strict):
    """A part of the summary that stands in place of reasoning."""

    type: Literal["summary_text"]
    text: str


class ReasoningInput(Strict):
    """The reasoning before an answer."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: Annotated[list[SummaryText], Bounded(MAX_MESSAGES)] = Field(default_factory=list)
    content: Annotated[list[ReasoningText], Bounded(MAX_MESSAGES)] | None = None
    status: _Status | None = None
    encrypted_content: NotServed = None

    def as_item(self) -> ReasoningItem:
        """The item, which has no id yet: its text, or the summary of it."""
        return ReasoningItem("", tuple(part.text for part in self.content or self.summary))


_KINDS: Mapping[str, type[FunctionCall | FunctionCallOutput | ReasoningInput]] = {
    "function_call": FunctionCall,
    "function_call_output": FunctionCallOutput,
    "reasoning": ReasoningInput,
}


def read_input(value: Any) -> Sequence[Item]:
    """The items of a request, which have no ids yet; raises ValueError that names the first wrong one."""
    if isinstance(value, str):
        return (MessageItem("", (value,), "user"),)
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string or a list of items")
    if len(value) > MAX_MESSAGES:
        raise ValueError(f"has {len(value)} items; at most {MAX_MESSAGES} are taken")
    return tuple(_item(item, f"item {index}") for index, item in enumerate(value))


def _item(body: Any, name: str) -> Item:
    if not isinstance(body, dict):
        raise ValueError(f"{name} must be an object")
    kind = body.get("type")
    if kind in (None, "message"):
        return _message(body, name)
    if not isinstance(kind, str):
        raise ValueError(f"{name} is of a type that is no text")
    if kind not in _KINDS:
        served = ", ".join(("message", *_KINDS))
        raise ValueError(f"{name} is of the type {kind[:40]!r}; only items of these types are served: {served}")
    return read_part(_KINDS[kind], body, name).as_item()


def _message(item: Mapping[str, Any], name: str) -> MessageItem:
    _check_fields(item, _ITEM_FIELDS, name)
    if item.get("role") not in _ROLES:
        raise ValueError(f"{name} needs a role, one of {', '.join(_ROLES)}")
    if item.get("phase") not in (None, "final_answer"):
        raise ValueError(f"{name} has a phase, which is not served")
    content = item.get("content")
    if not isinstance(content, str | list):
        raise ValueError(f"{name} needs a content, a string or a list of parts")
    if isinstance(content, str):
        return MessageItem("", (content,), item["role"])
    parts = [_part(part, f"{name}: part {index}") for index, part in enumerate(content)]
    if item["role"] == "assistant" and any(isinstance(part, ImagePart) for part in parts):
        raise ValueError(f"{name} has an image, which no message of the assistant has")
    return MessageItem("", tuple(parts), item["role"])


def _part(part: Any, name: str) -> str | ImagePart:
    if not (isinstance(part, dict) and part.get("type") == "input_image"):
        return _text(part, name)
    _check_fields(part, _IMAGE_FIELDS, name)
    if not isinstance(part.get("image_url"), str):
        raise ValueError(f"{name} needs an image_url, a data URL")
    check_detail(part.get("detail"), name)
    return image_of_url(part["image_url"], name)


def _texts(content: str | list[Any]) -> tuple[str, ...]:
    """The texts of parts; raises ValueError that names the part."""
    if isinstance(content, str):
        return (content,)
    return tuple(_text(part, f"part {index}") for index, part in enumerate(content))


def _text(part: Any, name: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("input_text", "output_text"):
        named = f"is of the type {kind[:40]!r}" if isinstance(kind, str) else "has no type"
        raise ValueError(f"{name} {named}; only 'input_text' and 'output_text' are served")
    _check_fields(part, _PART_FIELDS, name)
    if not isinstance(part.get("text"), str):
        raise ValueError(f"{name} needs a text")
    if part.get("annotations"):
        note_ignored(["annotations"])
    text: str = part["text"]
    return text


def _check_fields(body: Mapping[str, Any], known: set[str], name: str) -> None:
    if (unknown := next((field for field in body if field not in known), None)) is not None:
        raise ValueError(f"{name} has the unknown field {unknown[:40]!r}")
