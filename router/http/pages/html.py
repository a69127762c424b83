"""Pages for browsers: each is sent as one HTML text, whose scripts fetch what they show from their own router.

The pages themselves hold no secret and are open to everybody; their scripts send the key that a person types in, or the
browser the one that it was asked for.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from baton.clock import Clock
from router.http.pages.openapi import description

_INLINE = re.compile(rb"<(script|style)>(.*?)</\1>", re.DOTALL)
_FILES = re.compile(rb'<script src="([a-z_/.]+)"></script>|<link rel="stylesheet" href="([a-z_/.]+)">')


def page_headers(page: bytes) -> Mapping[str, str]:
    """The headers of an HTML page: a policy by which a browser runs the page's own scripts and no other.

    Even text of a model that became markup by mistake could neither run nor load anything (W3C's Content Security
    Policy Level 3 and Trusted Types).
    """
    allowed: dict[bytes, list[str]] = {b"script": [], b"style": []}
    for kind, content in _INLINE.findall(page):
        digest = base64.b64encode(hashlib.sha256(content).digest()).decode()
        allowed[kind].append(f"'sha256-{digest}'")
    policy = (
        f"default-src 'none'; script-src {' '.join(allowed[b'script'])}; style-src {' '.join(allowed[b'style'])}",
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    )
    return {
        "cache-control": "no-store",
        "content-security-policy": "; ".join(policy),
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }


def read_page(name: str) -> bytes:
    """The HTML of a page of this folder, with the scripts and styles in it that it names as files of this folder.

    So a page comes whole or not at all, with one request, and needs no further path.
    """
    folder = Path(__file__).parent

    def inlined(match: re.Match[bytes]) -> bytes:
        script, style = match.groups()
        tag = b"script" if script else b"style"
        return b"<%b>\n%b</%b>" % (tag, folder.joinpath((script or style).decode()).read_bytes(), tag)

    return _FILES.sub(inlined, folder.joinpath(name).read_bytes())


def html_pages() -> list[Route]:
    """The routes / (a chat), /docs (the reference of the API) and /openapi.json, from which that is made."""
    return [
        Route("/", _show_page("chat.html")),
        Route("/docs", _show_page("docs.html")),
        Route("/openapi.json", _openapi),
    ]


def _show_page(name: str) -> Callable[[Request], Response]:
    page = read_page(name)
    headers = page_headers(page)

    async def show(_request: Request) -> Response:
        return Response(page, media_type="text/html", headers=headers)

    return show  # type: ignore[return-value]  # starlette takes coroutine functions


async def _openapi(_request: Request) -> Response:
    return Response(_openapi_json(), media_type="application/json")


@lru_cache(maxsize=1)
def _openapi_json() -> bytes:
    return json.dumps(description(), ensure_ascii=False).encode()


class LiveData:
    """The live page's data: made when somebody asks, and the same for all who ask within `every_s` seconds.

    The page asks again and again instead of holding a stream of events, since a browser has six connections to a host
    under HTTP/1.1: with as many pages open it would send that router nothing more. The page changes nothing.
    """

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
