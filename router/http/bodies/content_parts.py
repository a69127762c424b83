"""Parts of a message's content, as OpenAI's API has them: text and images."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from router.http.bodies.fields import Ignored
from router.http.bodies.strict import Strict, read_part

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
    parts = [_part(part, place) for place, part in enumerate(value)]
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


def _part(part: Any, place: int) -> str | ImagePart:
    name = f"part {place}"
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text":
        return read_part(TextPart, part, name).text
    if kind == "image_url":
        return _image_of(read_part(ImageUrlPart, part, name).image_url, name)
    raise ValueError(
        f"part {place} must be {{'type': 'text', 'text': ...}} or {{'type': 'image_url', 'image_url': {{'url': ...}}}}"
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


def message_parts(found: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The parts of the messages of a body, or of its input, before anything of it was checked, in any API."""
    lists = [value for name in ("messages", "input") if isinstance(value := found.get(name), list)]
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
