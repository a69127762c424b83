"""The blocks of a message's content in Anthropic's API, as clients send them, and as a chat template gets them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal, Protocol

from pydantic import BeforeValidator, PlainValidator

from baton.errors import InvalidRequest
from baton.messages.request_limits import MAX_MESSAGES, MAX_TOOLS
from router.http.bodies.content_parts import ImagePart, TemplateMessage, image_of_base64, template_call
from router.http.bodies.fields import Ignored, NotServed, Strict, read_part
from router.http.bodies.tools import CallId, ToolName


class _CachedBlock(Strict):
    """A block that may end a cached prefix, which changes nothing: every prefix is cached."""

    cache_control: Ignored = None


class TextBlock(_CachedBlock):
    """Text."""

    type: Literal["text"]
    text: str
    citations: Ignored = None


def _data(value: Any) -> bytes:
    if not isinstance(value, str):
        raise ValueError("must be a string")
    return image_of_base64(value, "data")


def _source_type(value: Any) -> Any:
    if value == "url":
        raise ValueError("must be 'base64': images are not fetched from elsewhere")
    return value


class ImageSource(Strict):
    """The data of an image. By URL it comes only where the router fetches it, which puts the data in its place."""

    type: Annotated[Literal["base64"], BeforeValidator(_source_type)]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    url: NotServed = None
    data: Annotated[bytes, PlainValidator(_data, json_schema_input_type=str)]


class ImageBlock(_CachedBlock):
    """An image."""

    type: Literal["image"]
    source: ImageSource


class DirectCaller(Strict):
    """The caller of a tool, which is always the model itself."""

    type: Literal["direct"]


class ToolUse(_CachedBlock):
    """A call that the assistant made."""

    type: Literal["tool_use"]
    id: CallId
    name: ToolName
    input: dict[str, Any]
    caller: DirectCaller | None = None
    toolset_name: NotServed = None


class Thinking(Strict):
    """Reasoning of the assistant. The signature is not checked: reasoning that a client invents does no harm."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class RedactedThinking(Strict):
    """Reasoning that only its author can read, which is therefore left out."""

    type: Literal["redacted_thinking"]
    data: str


def _texts(value: Any) -> Sequence[TextBlock]:
    return _blocks(value, _TEXT)


TextContent = Annotated[
    Sequence[TextBlock], PlainValidator(_texts, json_schema_input_type=str | list[TextBlock] | None)
]


class ToolResult(_CachedBlock):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: CallId
    content: TextContent = ()
    is_error: bool | None = None
    toolset_name: NotServed = None

    @property
    def text(self) -> str:
        """The text of the result, which says that it is an error: templates know no other place for that."""
        text = text_of(self.content)
        return f"error: {text}" if self.is_error else text


Block = TextBlock | ImageBlock | ToolUse | ToolResult | Thinking | RedactedThinking
_TEXT: Mapping[str, type[TextBlock]] = {"text": TextBlock}
_OF_USERS: Mapping[str, type[TextBlock] | type[ImageBlock] | type[ToolResult]] = {
    **_TEXT,
    "image": ImageBlock,
    "tool_result": ToolResult,
}
_OF_ASSISTANTS: Mapping[str, type[Block]] = {
    **_TEXT,
    "tool_use": ToolUse,
    "thinking": Thinking,
    "redacted_thinking": RedactedThinking,
}
_OF_ROLES: Mapping[str, Mapping[str, type[Any]]] = {"system": _TEXT, "user": _OF_USERS, "assistant": _OF_ASSISTANTS}


def _any_blocks(value: Any) -> Sequence[Block]:
    return _blocks(value, {**_OF_USERS, **_OF_ASSISTANTS})


Content = Annotated[Sequence[Block], PlainValidator(_any_blocks, json_schema_input_type=str | list[Block])]


def check_role(role: str, blocks: Sequence[Block]) -> None:
    """Raises ValueError for a block that messages of this role do not have."""
    kinds = _OF_ROLES[role]
    for index, block in enumerate(blocks):
        if block.type not in kinds:
            raise ValueError(
                f"block {index} is of the type {block.type!r}, which no message of the role {role} may have"
            )


def text_of(blocks: Sequence[Block]) -> str:
    """The text of those that are text, joined by newlines, as are the parts of a chat's message."""
    return "\n".join(block.text for block in blocks if isinstance(block, TextBlock))


def parts_of(blocks: Sequence[Block]) -> list[str | ImagePart]:
    """The texts and images among the blocks, in order; texts that follow each other are joined by newlines."""
    parts: list[str | ImagePart] = []
    for is_text, group in groupby(blocks, lambda block: not isinstance(block, ImageBlock)):
        if is_text:
            parts += filter(None, [text_of(list(group))])
        else:
            parts += [
                ImagePart(block.source.data, block.source.media_type)
                for block in group
                if isinstance(block, ImageBlock)
            ]
    return parts


def _blocks(value: Any, kinds: Mapping[str, type[Any]]) -> Sequence[Any]:
    if isinstance(value, str):
        return (TextBlock(type="text", text=value),)
    if value is None and kinds is _TEXT:
        return ()
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of blocks")
    return tuple(_block(block, index, kinds) for index, block in enumerate(value))


def _block(block: Any, index: int, kinds: Mapping[str, type[Any]]) -> Any:
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str):
        raise ValueError(f"block {index} has no type")
    if kind not in kinds:
        raise ValueError(f"block {index} is of the type {kind[:40]!r}; only {', '.join(kinds)} are served")
    return read_part(kinds[kind], block, f"block {index}")


class Turn(Protocol):
    """One message, as a client sends it."""

    @property
    def role(self) -> str: ...

    @property
    def content(self) -> Sequence[Block]: ...


def template_messages(system: str, turns: Sequence[Turn]) -> Sequence[dict[str, Any]]:
    """The messages for the model's template; raises InvalidRequest for more than a chat may have, and for the result of
    a call that is not before it.

    Messages of the same role that follow each other are one, as in Anthropic's API: many templates want the roles to
    alternate. Each result of a call is a message of its own, of the role `tool`.
    """
    messages = [TemplateMessage("system", [system])] if system else []
    call_ids: set[str] = set()
    for index, turn in enumerate(turns):
        name = f"messages[{index}].content"
        for message in _of_assistant(turn.content) if turn.role == "assistant" else _of_user(turn.role, turn.content):
            if message.call_id is not None and message.call_id not in call_ids:
                reason = f"has the result of the call {message.call_id[:80]!r}, which is not before it"
                raise InvalidRequest(name, reason)
            call_ids.update(call["id"] for call in message.calls)
            if messages and messages[-1].role == message.role != "tool":
                messages[-1].texts += message.texts
                messages[-1].reasoning += message.reasoning
                messages[-1].calls += message.calls
            else:
                messages.append(message)
        if len(messages) > MAX_MESSAGES:
            raise InvalidRequest(name, f"has, with those before, more than {MAX_MESSAGES} messages and results")
        if len(messages[-1].calls) > MAX_TOOLS:
            raise InvalidRequest(name, f"has more than {MAX_TOOLS} calls")
    return [message.as_message() for message in messages]


def _of_assistant(blocks: Sequence[Block]) -> Iterator[TemplateMessage]:
    reasoning = [block.thinking for block in blocks if isinstance(block, Thinking) and block.thinking]
    calls = [template_call(block.id, block.name, block.input) for block in blocks if isinstance(block, ToolUse)]
    yield TemplateMessage("assistant", list(filter(None, [text_of(blocks)])), reasoning, calls)


def _of_user(role: str, blocks: Sequence[Block]) -> Iterator[TemplateMessage]:
    """Results of calls, and the texts and images between them, in their order."""
    begin, has_results = 0, False
    for index, block in enumerate(blocks):
        if not isinstance(block, ToolResult):
            continue
        if parts := parts_of(blocks[begin:index]):
            yield TemplateMessage(role, parts)
        yield TemplateMessage("tool", [block.text], call_id=block.tool_use_id)
        begin, has_results = index + 1, True
    if parts := parts_of(blocks[begin:]):
        yield TemplateMessage(role, parts)
    elif not has_results:
        yield TemplateMessage(role)
