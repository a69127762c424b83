"""The live page of the cluster: one HTML file, and its data as JSON, which the page asks for again and again.

It asks instead of holding a stream of events, since a browser has six connections to a host under HTTP/1.1: with as
many pages open it would send that router nothing more. The page changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from baton.clock import Clock
from router.http.html_pages import page_headers, read_page


class LiveData:
    """The page's data: made when somebody asks, and the same for all who ask within `every_s` seconds."""

    def __init__(self, data: Callable[[], bytes], clock: Clock, every_s: float) -> None:
        self._data = data
        self._clock = clock
        self._every_s = every_s
        self._latest = b""
        self._until_s = float("-inf")

    def latest(self) -> bytes:
        """The data as JSON."""
        if (now := self._clock.monotonic()) >= self._until_s:
            self._latest, self._until_s = self._data(), now + self._every_s
        return self._latest


def live_pages(live: LiveData) -> list[Route]:
    """The routes /ui and /ui/data."""
    page = read_page("live.html")
    headers = page_headers(page)

    async def show(_request: Request) -> Response:
        return Response(page, media_type="text/html", headers=headers)

    async def data(_request: Request) -> Response:
        return Response(live.latest(), media_type="application/json", headers=headers)

    return [Route("/ui", show), Route("/ui/data", data)]
