"""Streams of a running router, read by hand and cut where a test wants."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from typing import Any

Events = list[tuple[str, Any]]
"""The last id that the client has seen, and the data: JSON or `[DONE]`."""


def sse(
    url: str,
    body: dict[str, object],
    headers: dict[str, str],
    limit: int | None = None,
    at_limit: Callable[[], object] = lambda: None,
) -> Events:
    """A stream's events; `at_limit` is called after so many, and then the connection is closed."""
    asked = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json", **headers})
    events: Events = []
    last_id = ""
    with urllib.request.urlopen(asked, timeout=60) as answer:
        for line in answer:
            name, _, value = line.decode().rstrip("\n").partition(": ")
            if name == "id":
                last_id = value
            elif name == "data":
                events.append((last_id, value if value == "[DONE]" else json.loads(value)))
            if len(events) == limit:
                at_limit()
                break
    return events


def _choices(events: Events, index: int) -> list[dict[str, Any]]:
    found = [choice for _, data in events if data != "[DONE]" for choice in data["choices"]]
    return [choice for choice in found if choice["index"] == index]


def tokens_of(events: Events, index: int = 0) -> list[int]:
    """A sequence's tokens, of a stream that was asked for with return_token_ids."""
    return [token for choice in _choices(events, index) for token in choice.get("token_ids", ())]


def text_of(events: Events, index: int = 0) -> str:
    """A sequence's text, of a chat."""
    return "".join(choice["delta"].get("content", "") for choice in _choices(events, index))
