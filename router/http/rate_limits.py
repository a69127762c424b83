"""Headers that tell a client what it has left of its quotas, by the names that OpenAI's API has for them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from starlette.types import Message, Send

from router.admission.quotas import RateLimit
from router.handler import Handler
from router.http.errors import Headers

KINDS = ("requests", "tokens")
NAMES = tuple(f"x-ratelimit-{what}-{kind}" for kind in KINDS for what in ("limit", "remaining", "reset"))


def with_rate_limits(handler: Handler, send: Send) -> Send:
    """Sends answers with the headers of the caller's quotas, as they are when the answer begins."""

    async def send_limits(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], *headers_of(handler.rate_limits())]}
        await send(message)

    return send_limits


def headers_of(limits: Sequence[RateLimit]) -> Headers:
    """Limit, remaining and reset of each."""
    headers: Headers = []
    for limit in limits:
        shown = {"limit": str(limit.limit), "remaining": str(limit.remaining), "reset": duration(limit.reset_s)}
        headers += [(f"x-ratelimit-{what}-{limit.kind}".encode(), text.encode()) for what, text in shown.items()]
    return headers


def duration(seconds: float) -> str:
    """A time as OpenAI writes it: 20ms, 1s, 6m0s, 23h59m59s; rounded up."""
    if seconds < 1.0:
        return f"{math.ceil(seconds * 1e3)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (f"{hours}h" if hours else "") + (f"{minutes}m" if hours or minutes else "") + f"{rest}s"
