"""Reads the input of a response: a text, or a list of items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator

from baton.messages.request_limits import MAX_MESSAGES
from router.http.bodies.content_parts import ImagePart, check_detail, image_of_url
from router.http.bodies.fields import NotServed, OnlyFalse
from router.http.bodies.ignored import note_ignored
from router.http.bodies.strict import Bounded, Strict, read_part
from router.http.bodies.tools import CallId, ToolName
from router.http.responses.items import CallItem, CallOutputItem, Item, MessageItem, ReasoningItem

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
    return tuple(_item(item, f"item {place}") for place, item in enumerate(value))


def _item(found: Any, name: str) -> Item:
    if not isinstance(found, dict):
        raise ValueError(f"{name} must be an object")
    kind = found.get("type")
    if kind in (None, "message"):
        return _message(found, name)
    if not isinstance(kind, str):
        raise ValueError(f"{name} is of a type that is no text")
    if kind not in _KINDS:
        served = ", ".join(("message", *_KINDS))
        raise ValueError(f"{name} is of the type {kind[:40]!r}; only items of these types are served: {served}")
    return read_part(_KINDS[kind], found, name).as_item()


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
    parts = [_part(part, f"{name}: part {place}") for place, part in enumerate(content)]
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
    return tuple(_text(part, f"part {place}") for place, part in enumerate(content))


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


def _check_fields(found: Mapping[str, Any], known: set[str], name: str) -> None:
    if (unknown := next((field for field in found if field not in known), None)) is not None:
        raise ValueError(f"{name} has the unknown field {unknown[:40]!r}")
