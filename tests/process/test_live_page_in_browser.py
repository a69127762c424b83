"""The live page in a browser: 200 nodes, on a phone, too; it requests nothing but from its router."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from random import Random

from baton.messages.operator import ClusterEvent, ClusterStatus, TenantRow, TenantRows
from router.http.app import HttpFront
from router.http.model import ServedModel
from router.http.pages.html import LiveData, live_pages
from router.http.responses.store import ResponseStore
from router.http.server import HttpServer
from router.operations.live_page import live_page_data
from tests.doubles.fake_clock import FakeClock
from tests.doubles.fake_handler import FakeHandler
from tests.support.browser import Browser
from tests.support.http_rig import BOUNDS, CARD
from tests.support.live_cluster_page import history_of, node, row

HOSTILE = "<img src=x onerror=window.pwned=1><script>window.pwned=1</script>"
CUT = """[...document.querySelectorAll('body *')].filter(each =>
  each.scrollWidth > each.clientWidth + 1 && getComputedStyle(each).display !== 'inline' && !each.closest('svg')
).map(each => each.className + ': ' + each.textContent.slice(0, 60))"""
"""Elements whose content is wider than they are."""
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
SHOWN = """new Promise(done => {
  const look = () => document.querySelectorAll('.node').length ? done(true) : requestAnimationFrame(look);
  look();
})"""


class LargeCluster:
    """Many nodes, and three routers, of which one has a hostile name and publishes no figures."""

    def __init__(self) -> None:
        self._history = history_of(400, num_routers=2, failed=0)

    def __call__(self) -> bytes:
        nodes = [node(f"{role}-{n}", role) for role in ("prefill", "decode") for n in range(100)]
        nodes.append(node(HOSTILE, "decode", status="Lost", detail=HOSTILE))
        nodes += [node(name, "router") for name in ("r0", "r1", HOSTILE)]
        states = ("Waiting", "Prefilling", "Transferring", "Decoding", "Retrying")
        tenant = TenantRow(HOSTILE, HOSTILE, 1.5, 3, 2, 90.0, 60.0, 2, 3.0, 5.0, 0, 1)
        drawn = live_page_data(
            ClusterStatus(HOSTILE, "degraded", HOSTILE, nodes),
            HOSTILE,
            self._history,
            [row(f"r{n}-{HOSTILE}", state=states[n % 5]) for n in range(60)],
            300,
            [row(f"over-{n}", state="Failed", detail=HOSTILE, total_ms=1234.5, kv_bytes=1 << 20) for n in range(20)],
            [ClusterEvent(n, float(n), "Warning", "NodeLost", HOSTILE, detail=HOSTILE) for n in range(5)],
            "r0",
            TenantRows([tenant] * 12, 80.0),
        )
        return json.dumps(drawn).encode()


async def test_a_large_cluster_fits_on_every_screen(chromium: Browser, tmp_path: Path) -> None:
    model = ServedModel(lambda: CARD, None, None, lambda: None)  # type: ignore[arg-type, return-value]
    clock = FakeClock()
    live = LiveData(LargeCluster(), clock, every_s=2.0)
    store = ResponseStore(BOUNDS, clock)
    front = HttpFront(FakeHandler(), model, str, bytes, clock, Random(1), store, more_routes=live_pages(live))
    server = HttpServer(front)
    port = server.bind("127.0.0.1", 0)
    await server.start()
    url = f"http://127.0.0.1:{port}/ui"
    try:
        for width, scheme in ((1200, "dark"), (400, "light")):
            await asyncio.to_thread(_look, chromium, url, width, scheme)
    finally:
        await asyncio.to_thread(chromium.leave)
        await server.stop(1.0)


def _look(chromium: Browser, url: str, width: int, scheme: str) -> None:
    chromium.visit(url, width=width, scheme=scheme)
    chromium.run(SHOWN)
    assert chromium.complaints == []
    assert set(chromium.requests) == {url, f"{url}/data"}
    assert chromium.run("document.querySelectorAll('.node').length") == 201
    assert chromium.run("document.querySelectorAll('.lane').length") == 40
    assert chromium.run("byId('lanes').lastChild.textContent") == "and 260 more"
    assert chromium.run("document.querySelectorAll('.track i.now').length") == 40
    assert chromium.run("byId('cluster').textContent") == f"Baton {HOSTILE}"
    shown = chromium.run("[...document.querySelectorAll('.figure')].map(each => each.innerText.replace(/\\s+/g, ' '))")
    assert shown[0] == "Generated tokens 50 tokens/s mean of 10 s 10 min ago max 50/s"
    assert shown[2].startswith("Time to first token 10 ms median of the last minute; p99 98 ms")
    assert shown[-3] == "Failed 0 requests in the last 10 min"
    assert chromium.run("document.querySelectorAll('.figure polyline').length") == 6
    names = chromium.run("[...document.querySelectorAll('.router b')].map(each => each.textContent)")
    assert names == [HOSTILE, "r0", "r1"]
    assert chromium.run("byId('model').textContent") == f"Model {HOSTILE}"
    assert chromium.run(CUT) == []
    assert chromium.run("window.pwned === undefined && !document.querySelector('main img, main script')")
    assert chromium.run(OVERFLOW) == 0
