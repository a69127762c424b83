"""Pages of other origins: which ones may call the router from a browser, and what their scripts may read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from pydantic import ValidationError

from baton.config import RouterConfig
from baton.security.http_access import PageAuthenticator
from baton.security.keys import KeyRing, write_keys
from baton.text.chat_template import DEFAULT_TEMPLATE
from router.http.app import with_cors
from tests.support.http_client import AsgiClient, Exchange
from tests.support.http_rig import HttpRig, chunk, finished

PAGE = "https://chat.example.org"
COMPLETIONS = "/v1/completions"
ASKS = {"origin": PAGE, "access-control-request-method": "POST", "access-control-request-headers": "authorization, x-a"}


def client(*origins: str, rig: HttpRig | None = None) -> AsgiClient:
    rig = rig or HttpRig()
    return AsgiClient(with_cors(rig.front(rig.handler, 1000.0, DEFAULT_TEMPLATE), origins))


def configured(origins: str) -> RouterConfig:
    return RouterConfig.model_validate({"router_id": "r", "registry": "redis://x", "cors_origins": origins})


async def preflight(asked: AsgiClient, headers: Mapping[str, str] = ASKS) -> Exchange:
    return await asked.request("OPTIONS", COMPLETIONS, b"", headers).end()


async def test_a_permitted_page_may_send_json_and_a_key() -> None:
    answer = await preflight(client("https://other.org", PAGE))
    assert answer.status == 200
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert answer.headers["access-control-allow-headers"] == "authorization, x-a"
    assert "Origin" in answer.headers["vary"]
    assert "access-control-allow-credentials" not in answer.headers


async def test_a_preflight_needs_no_key_and_the_request_behind_it_does(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    write_keys(keys, [])
    rig = HttpRig(authenticator=PageAuthenticator("127.0.0.1", "", KeyRing(keys)))
    asked = client(PAGE, rig=rig)
    assert (await preflight(asked)).status == 200
    refused = await asked.post(COMPLETIONS, {"prompt": "a"}, {"origin": PAGE}).end()
    # The page can read why.
    assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, PAGE)
    assert (await asked.request("OPTIONS", COMPLETIONS, b"", {"origin": PAGE}).end()).status == 401


@pytest.mark.parametrize(
    "headers",
    [
        {**ASKS, "origin": "https://chat.example.org.evil.org"},
        {**ASKS, "origin": "http://chat.example.org"},
        {**ASKS, "origin": "null"},
        {**ASKS, "access-control-request-method": "PUT"},
    ],
)
async def test_other_pages_and_methods_are_refused(headers: dict[str, str]) -> None:
    answer = await preflight(client(PAGE), headers)
    assert answer.status == 400
    assert headers["origin"] == PAGE or "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("stream", [True, False])
async def test_a_permitted_page_may_read_an_answer_and_its_headers(stream: bool) -> None:
    rig = HttpRig()
    exchange = client(PAGE, rig=rig).post(COMPLETIONS, {"prompt": "a", "stream": stream}, {"origin": PAGE})
    (await rig.next_call()).tell(chunk(0, "b"), finished())
    await exchange.end()
    assert (exchange.status, exchange.headers["access-control-allow-origin"]) == (200, PAGE)
    assert exchange.headers["vary"] == "Origin"
    assert {"x-request-id", "retry-after"} <= set(exchange.headers["access-control-expose-headers"].split(", "))


async def test_another_page_may_not_read_an_answer_and_caches_keep_them_apart() -> None:
    for headers in ({"origin": "https://evil.org"}, {}):
        answer = await client(PAGE).request("GET", "/v1/models", b"", headers).end()
        assert "access-control-allow-origin" not in answer.headers
        assert answer.headers["vary"] == "Origin"


async def test_any_page_is_permitted_by_a_star_alone() -> None:
    assert (await preflight(client("*"))).headers["access-control-allow-origin"] == "*"
    assert (await client("*").request("GET", "/livez", b"", ASKS).end()).headers["access-control-allow-origin"] == "*"


async def test_no_page_is_permitted_unless_it_is_set() -> None:
    answer = await preflight(client())
    assert answer.status == 405
    assert not {name for name in answer.headers if name.startswith("access-control")}


@pytest.mark.parametrize(
    "value", ["", "*", PAGE, f"{PAGE}:8443, http://localhost:3000,*", "http://[::1]:80", "app://x"]
)
def test_origins_are_written_as_browsers_send_them(value: str) -> None:
    assert configured(value).cors_origins == value


@pytest.mark.parametrize(
    "value", ["chat.example.org", f"{PAGE}/", f"{PAGE}/chat", "HTTPS://X.org", "https://*.org", "a b"]
)
def test_what_no_browser_sends_is_refused_as_an_origin(value: str) -> None:
    with pytest.raises(ValidationError, match="must be"):
        configured(value)
