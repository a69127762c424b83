"""A loop of tools for tests of the HTTP service: what a scripted model writes, and what its tools return."""

from __future__ import annotations

from collections.abc import Callable

from tests.support.http_rig import chunk, finished
from tests.support.served_http import Served

SCRIPT = [
    ("I look.\n", [("add", {"a": 1, "b": 2}), ("now", {})]),
    ("", [("add", {"a": 3, "b": 4})]),
]
"""What the model writes before its answer: a text, and calls."""
DONE = "It is 7; I don't know the time."


def add(a: int, b: int) -> str:
    return str(a + b)


def now() -> str:
    raise OSError("the clock is broken")


RUN: dict[str, Callable[..., str]] = {"add": add, "now": now}


async def tell(one: Served, text: str, reason: str = "stop") -> str:
    """Let the model write this text, token by token; returns its prompt."""
    call = await one.rig.next_call()
    assert call.request is not None
    assert call.request.is_parsed
    assert call.request.prompt is not None
    call.tell(*(chunk(place, letter) for place, letter in enumerate(text)), finished(reason, len(text)))
    return "".join(map(chr, call.request.prompt))  # type: ignore[arg-type]
