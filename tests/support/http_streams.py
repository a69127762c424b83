"""Reads HTTP streams of a running router, and cuts them where a test wants."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from typing import Any

Events = list[tuple[str, Any]]
"""For each event the last event id that the client has seen, and the data: JSON or `[DONE]`."""


def sse(
    url: str,
    body: dict[str, object],
    headers: dict[str, str],
    limit: int | None = None,
    at_limit: Callable[[], object] = lambda: None,
) -> Events:
    """Return the events of a stream. After `limit` events `at_limit` is called and the connection is closed."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json", **headers})
    events: Events = []
    last_id = ""
    with urllib.request.urlopen(request, timeout=60) as answer:
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
    """Return the tokens of a sequence, from a stream with return_token_ids."""
    return [token for choice in _choices(events, index) for token in choice.get("token_ids", ())]


def text_of(events: Events, index: int = 0) -> str:
    """Return the text of a sequence, from a streamed chat."""
    return "".join(choice["delta"].get("content", "") for choice in _choices(events, index))
