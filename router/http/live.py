"""The live page of the cluster: one HTML file, and its data as server-sent events. It changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from baton.background import OnFault, start_background
from baton.errors import Overloaded
from router.http.html_pages import page_headers, read_page

MAX_VIEWERS = 64


class LiveFeed:
    """Makes the page's data regularly while there are viewers, once for all of them. Belongs to the event loop.

    A slow viewer misses some updates, and does not delay the others.
    """

    def __init__(self, data: Callable[[], bytes], every_s: float = 1.0) -> None:
        self._data = data
        self._every_s = every_s
        self._latest = b""
        self._number = 0
        self._changed = asyncio.Event()
        self._viewers = 0
        self._updating: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def num_viewers(self) -> int:
        return self._viewers

    def close(self) -> None:
        """End the updates of all viewers."""
        self._is_closed = True
        self._wake_viewers()

    async def follow(self) -> AsyncIterator[bytes]:
        """Each update as soon as it is there; raises Overloaded if there are MAX_VIEWERS already."""
        if self._viewers >= MAX_VIEWERS:
            raise Overloaded(f"{MAX_VIEWERS} viewers have this page open, as many as may: close one")
        self._viewers += 1
        seen = 0
        try:
            if self._updating is None:
                self._updating = start_background(self._update_regularly, "live-page", on_fault=OnFault.RESTART)
            while not self._is_closed:
                changed = self._changed
                if self._number > seen:
                    seen = self._number
                    yield self._latest
                else:
                    await changed.wait()
        finally:
            self._viewers -= 1
            if not self._viewers and self._updating is not None:
                self._updating.cancel()
                self._updating, self._latest, self._number = None, b"", 0

    async def _update_regularly(self) -> None:
        while True:
            self._latest = self._data()
            self._number += 1
            self._wake_viewers()
            await asyncio.sleep(self._every_s)

    def _wake_viewers(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def live_pages(feed: LiveFeed) -> list[Route]:
    """The routes /ui and /ui/events."""
    page = read_page("live.html")
    headers = page_headers(page)

    async def show(_request: Request) -> Response:
        return Response(page, media_type="text/html", headers=headers)

    async def follow(_request: Request) -> Response:
        datas = feed.follow()
        # Awaited here, so that too many viewers are refused before the answer begins.
        first = await anext(datas, b"")
        return StreamingResponse(_events(first, datas), media_type="text/event-stream", headers=headers)

    return [Route("/ui", show), Route("/ui/events", follow)]


async def _events(first: bytes, datas: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    async with aclosing(datas):  # type: ignore[type-var]
        if first:
            yield b"data: %b\n\n" % first
        async for data in datas:
            yield b"data: %b\n\n" % data
