"""No spelling of a path gives a caller a page that its role may not read, on the HTTP servers of router and node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from baton.observe.metrics_page import MetricsPage
from baton.security.http_access import PageAuthenticator
from baton.security.keys import KeyRing, new_key, write_keys
from baton.security.matrix import CallerRole
from baton.text.chat_template import DEFAULT_TEMPLATE
from router.http.server import HttpServer
from tests.support.http_rig import HttpRig

FIGURES = b"figures\n"
SPELLINGS = [
    *(
        b"/metrics%0a",
        b"/metrics%0A",
        b"/metrics%0d%0a",
        b"/metrics%00",
        b"/metrics%09",
        b"/metrics%7f",
        b"/%0ametrics",
    ),
    *(
        b"//metrics",
        b"/metrics/",
        b"/./metrics",
        b"/%2e/metrics",
        b"/v1/../metrics",
        b"/livez/../metrics",
        b"/metrics/.",
    ),
    *(b"/%2fmetrics", b"%2fmetrics", b"/metrics%2f", b"/%6detrics", b"/%256detrics", b"/METRICS", b"/Metrics"),
    *(
        b"/metrics%20",
        b"/metrics?x=1",
        b"/metrics%3f",
        b"/metrics;x",
        b"/metrics%c2%85",
        b"/metrics%e2%80%a8",
        b"/metrics#x",
    ),
    *(b"http://h/metrics", b"*", b"metrics", b"//", b"/%", b"/%zz", b"/\xff", b"/%ff", b"/v1%0a/models", b"/livez%0a"),
]
SAME_PATH = {b"/%6detrics", b"/metrics?x=1", b"/metrics#x", b"http://h/metrics", b"%2fmetrics"}
"""Equivalent spellings of /metrics, by RFC 3986 or the server's parser: they serve the page to the right keys."""


@pytest.fixture
def keys(tmp_path: Path) -> dict[CallerRole, str]:
    made = [new_key(role.value, role, "") for role in (CallerRole.CLIENT, CallerRole.MONITOR)]
    write_keys(tmp_path / "keys", [entry for _, entry in made])
    return {entry.role: key for key, entry in made}


@pytest.fixture(params=["router", "node"])
async def port(request: pytest.FixtureRequest, tmp_path: Path, keys: object) -> AsyncIterator[int]:
    authenticator = PageAuthenticator("127.0.0.1", "", KeyRing(tmp_path / "keys"))
    if request.param == "node":
        page = MetricsPage(lambda: FIGURES, authenticator)
        yield await page.start("127.0.0.1", 0)
        await page.stop()
        return
    rig = HttpRig(authenticator=authenticator)
    server = HttpServer(rig.front(rig.handler, 1000.0, DEFAULT_TEMPLATE))
    bound = server.bind("127.0.0.1", 0)
    await server.start()
    yield bound
    await server.stop(1.0)


async def answer(port: int, path: bytes, key: str) -> tuple[int, bytes]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    shown = f"authorization: Bearer {key}\r\n" if key else ""
    writer.write(b"GET " + path + b" HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n" + shown.encode() + b"\r\n")
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return int(head.split()[1]), body


async def test_no_spelling_of_a_path_opens_a_page_without_the_right_key(port: int, keys: dict[CallerRole, str]) -> None:
    found: list[tuple[bytes, str, int]] = []
    for path in [b"/metrics", *SPELLINGS]:
        for key in ("", keys[CallerRole.CLIENT]):
            status, body = await answer(port, path, key)
            if status not in (400, 401, 403, 404) or FIGURES in body:
                found.append((path, key, status))
    assert not found


async def test_a_page_is_served_under_equivalent_paths_only(port: int, keys: dict[CallerRole, str]) -> None:
    key = keys[CallerRole.MONITOR]
    assert await answer(port, b"/metrics", key) == (200, FIGURES)
    for path in set(SPELLINGS) - SAME_PATH:
        status, body = await answer(port, path, key)
        assert status in (400, 403, 404), path
        assert FIGURES not in body


async def test_a_path_with_a_control_character_is_refused() -> None:
    for path in ("/metrics\n", "/metrics\0", "/livez\n", "/v1/models\x7f", "/nothing\x85"):
        exchange = await HttpRig().request("GET", path, b"", {}).end()
        assert (exchange.status, exchange.error["param"]) == (400, "path")
