"""Contents of messages, in all APIs: the parts that clients send, and messages as a chat template gets them."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from baton.errors import InvalidRequest
from router.http.bodies.fields import Ignored, Strict, read_part
from router.http.json_body import parse_json

_DATA_URL = "data:image/"
_ENCODING = ";base64,"
_DETAILS = (None, "auto", "low", "high")


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image in a message."""

    data: bytes
    """The encoded image; nothing of it was looked at."""
    media_type: str
    """What the client says that it is; it is found in the data."""

    def as_url(self) -> str:
        """The image as a data URL."""
        return f"data:{self.media_type}{_ENCODING}{base64.b64encode(self.data).decode()}"


Content = str | tuple[str | ImagePart, ...]
"""The content of a message: a text, or parts of which at least one is an image."""


def content_of(value: Any) -> Content:
    """The content that a message has; texts are joined by newlines, as in vLLM. Raises ValueError."""
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of parts")
    parts = [_part(part, index) for index, part in enumerate(value)]
    if any(isinstance(part, ImagePart) for part in parts):
        return tuple(parts)
    return "\n".join(part for part in parts if isinstance(part, str))


class TextPart(Strict):
    """A text in the content of a chat's message."""

    type: Literal["text"]
    text: str
    cache_control: Ignored = None


class ImageUrlPart(Strict):
    """An image in the content of a chat's message."""

    type: Literal["image_url"]
    image_url: Any
    cache_control: Ignored = None


def _part(part: Any, index: int) -> str | ImagePart:
    name = f"part {index}"
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text":
        return read_part(TextPart, part, name).text
    if kind == "image_url":
        return _image_of(read_part(ImageUrlPart, part, name).image_url, name)
    raise ValueError(
        f"part {index} must be {{'type': 'text', 'text': ...}} or {{'type': 'image_url', 'image_url': {{'url': ...}}}}"
    )


def _image_of(value: Any, name: str) -> ImagePart:
    if isinstance(value, str):
        return image_of_url(value, name)
    if not isinstance(value, dict) or not value.keys() <= {"url", "detail"} or not isinstance(value.get("url"), str):
        raise ValueError(f"{name}: image_url must be {{'url': ...}}, with 'detail' if wanted")
    check_detail(value.get("detail"), name)
    return image_of_url(value["url"], name)


def check_detail(value: Any, name: str) -> None:
    """Raises ValueError for a detail that OpenAI's API does not have."""
    if value not in _DETAILS:
        raise ValueError(f"{name}: detail must be auto, low or high; it changes nothing")


def image_of_url(url: str, name: str) -> ImagePart:
    """The image in a data URL (RFC 2397). Raises ValueError, also for other URLs: nothing is fetched."""
    if not url.startswith(_DATA_URL):
        raise ValueError(f"{name}: url must be data:image/TYPE;base64,...: images are not fetched from elsewhere")
    head, encoding, data = url.partition(_ENCODING)
    if not encoding or len(head) > 64:
        raise ValueError(f"{name}: url must be data:image/TYPE;base64,...")
    return ImagePart(image_of_base64(data, name), head.removeprefix("data:"))


def image_of_base64(data: str, name: str) -> bytes:
    """The image in base64 (RFC 4648, section 4). Raises ValueError."""
    try:
        return base64.b64decode(data, validate=True)
    except ValueError:
        raise ValueError(f"{name}: the image is not base64") from None


def message_parts(body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The parts of the messages of a body, or of its input, before anything of it was checked, in any API."""
    lists = [value for name in ("messages", "input") if isinstance(value := body.get(name), list)]
    contents = (message.get("content") for messages in lists for message in messages if isinstance(message, dict))
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return (part for part in parts if isinstance(part, dict))


def images_in(contents: Sequence[Content]) -> list[bytes]:
    """All images of messages, in order."""
    return [
        part.data
        for content in contents
        if not isinstance(content, str)
        for part in content
        if isinstance(part, ImagePart)
    ]


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
