"""Permits pages of other origins to call a router from a browser (CORS).

Browsers ask with a preflight request before they send JSON or a key to another origin
(https://fetch.spec.whatwg.org/#http-cors-protocol). It shows no key, so it is answered before keys are checked; its
answer tells nothing but these settings. Cookies and passwords that a browser keeps are never permitted: a page has to
send a key by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

METHODS = ("DELETE", "GET", "HEAD", "POST")
EXPOSED = (
    *("x-request-id", "request-id", "retry-after", "retry-after-ms", "x-should-retry", "baton-seed"),
    *("baton-prefill-node", "baton-decode-node", "baton-attempts", "baton-path-reason", "baton-kv-bytes"),
    "x-baton-ignored-fields",
)
"""The headers of answers that pages may read."""
_PREFLIGHT_VALID_S = 600


def with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """The application, callable by pages of these origins, such as `https://chat.example.org`; `*`: of any origin."""
    if not origins:
        return app
    # Any header may be sent: OpenAI's JavaScript client has a dozen of its own.
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=METHODS,
        allow_headers=("*",),
        expose_headers=EXPOSED,
        max_age=_PREFLIGHT_VALID_S,
    )
