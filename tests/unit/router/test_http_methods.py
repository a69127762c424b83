"""Every path names in `Allow` all of the methods that it has when it is asked with another one (RFC 9110, 15.5.6)."""

from __future__ import annotations

import pytest
from starlette.routing import Route

from router.http.app import HttpFront
from tests.support.http_rig import HttpRig

ALLOWED = {
    "/v1/responses/resp_1": "DELETE, GET, HEAD",
    "/v1/responses/resp_1/cancel": "POST",
    "/v1/responses/resp_1/input_items": "GET, HEAD",
    "/v1/responses": "POST",
    "/v1/chat/completions": "POST",
    "/v1/messages": "POST",
    "/v1/models/x": "GET, HEAD",
    "/tokenize": "POST",
    "/metrics": "GET, HEAD",
    "/": "GET, HEAD",
}


@pytest.mark.parametrize(("path", "allowed"), ALLOWED.items())
async def test_a_wrong_method_is_refused_with_those_that_are_right(path: str, allowed: str) -> None:
    exchange = await HttpRig().request("PUT", path, b"", {}).end()
    assert exchange.status == 405
    assert exchange.headers["allow"] == allowed


async def test_no_path_that_is_served_lacks_a_method_in_allow() -> None:
    rig = HttpRig()
    front = rig._app
    assert isinstance(front, HttpFront)
    methods: dict[str, set[str]] = {}
    for route in front._routes.routes:
        assert isinstance(route, Route)
        methods.setdefault(route.path.replace("{id}", "x").replace("{name:path}", "x"), set()).update(
            route.methods or ()
        )
    # A stored response might have this name.
    methods["/v1/responses/input_tokens"] |= methods["/v1/responses/x"]
    for path, named in methods.items():
        exchange = await rig.request("PATCH", path, b"", {}).end()
        assert (exchange.status, set(exchange.headers["allow"].split(", "))) == (405, named), path
