"""The live page: one file without a build step, and what it shows, as server-sent events. To be looked at alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from baton.background import OnFault, start_background
from baton.errors import Overloaded

MAX_VIEWERS = 64
_PAGE = Path(__file__).with_name("live.html")
_HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline';"
    " connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class LiveFeed:
    """One picture after the other for any number of viewers, and none while there are none. Belongs to the loop.

    A picture is made once, whoever looks. Who is slow misses some, and costs nobody anything.
    """

    def __init__(self, picture: Callable[[], bytes], every_s: float = 1.0) -> None:
        self._picture = picture
        self._every_s = every_s
        self._latest = b""
        self._number = 0
        self._changed = asyncio.Event()
        self._viewers = 0
        self._drawing: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def num_viewers(self) -> int:
        return self._viewers

    def close(self) -> None:
        """Every viewer's pictures end."""
        self._is_closed = True
        self._tell()

    async def follow(self) -> AsyncIterator[bytes]:
        """The latest picture as soon as there is a newer one; raises Overloaded when too many look already."""
        if self._viewers >= MAX_VIEWERS:
            raise Overloaded(f"{MAX_VIEWERS} look at this page already")
        self._viewers += 1
        seen = 0
        try:
            if self._drawing is None:
                self._drawing = start_background(self._draw, "live-page", on_fault=OnFault.RESTART)
            while not self._is_closed:
                changed = self._changed
                if self._number > seen:
                    seen = self._number
                    yield self._latest
                else:
                    await changed.wait()
        finally:
            self._viewers -= 1
            if not self._viewers and self._drawing is not None:
                self._drawing.cancel()
                self._drawing, self._latest, self._number = None, b"", 0

    async def _draw(self) -> None:
        while True:
            self._latest = self._picture()
            self._number += 1
            self._tell()
            await asyncio.sleep(self._every_s)

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def live_pages(feed: LiveFeed) -> list[Route]:
    """/ui and what it asks for."""
    page = _PAGE.read_bytes()

    async def show(_request: Request) -> Response:
        return Response(page, media_type="text/html", headers=_HEADERS)

    async def follow(_request: Request) -> Response:
        pictures = feed.follow()
        # Too many viewers hear so before the answer begins.
        first = await anext(pictures, b"")
        return StreamingResponse(_events(first, pictures), media_type="text/event-stream", headers=_HEADERS)

    return [Route("/ui", show), Route("/ui/events", follow)]


async def _events(first: bytes, pictures: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    async with aclosing(pictures):  # type: ignore[type-var]
        if first:
            yield b"data: %b\n\n" % first
        async for picture in pictures:
            yield b"data: %b\n\n" % picture
