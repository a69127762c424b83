"""Authenticates HTTP requests, by the host name in the request and by the API key."""

from __future__ import annotations

import base64
import binascii
import re
import time
from collections.abc import Callable, Iterable

from baton.errors import InvalidRequest, PermissionDenied
from baton.security.binds import is_loopback
from baton.security.keys import KeyRing, bearer_key
from baton.security.matrix import ANYONE, Caller, CallerRole, callers_of_page

Headers = Iterable[tuple[bytes, bytes]]
"""Pairs of a header's name, in lower case, and its value."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
"""Control characters. No served path has one, and some comparisons ignore them: `$` in a regular expression, C strings.
"""


class PageAuthenticator:
    """Authenticates the requests of one HTTP server."""

    def __init__(
        self,
        host: str = "",
        allowed_hosts: str = "",
        keys: KeyRing | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`host`: the address on which the server listens. `allowed_hosts`: host names besides those of loopback under
        which clients may call it, separated by commas; `*`: any. `keys`: clients must send one of these keys; None:
        keys are not checked.
        """
        named = {name.strip().lower() for name in allowed_hosts.split(",") if name.strip()}
        self._takes_any_host = "*" in named or not (named or is_loopback(host))
        self._hosts = named
        self._keys = keys
        self._now = now

    def check(self, path: str, headers: Headers) -> Caller:
        """The caller of PATH, which is percent-decoded. Raises InvalidRequest, Unauthenticated or PermissionDenied.

        The key is in `authorization`, or else in `x-api-key`, where Anthropic's clients send it.
        """
        if _CONTROL.search(path):
            raise InvalidRequest("path", f"has a control character: {path[:200]!r}")
        key = other_key = ""
        for name, value in headers:
            if name == b"host":
                self._check_host(value.decode("latin-1"))
            elif name == b"authorization":
                key = key_from_authorization(value.decode("latin-1"))
            elif name == b"x-api-key":
                other_key = value.decode("latin-1").strip()
        allowed = callers_of_page(path)
        if self._keys is None or CallerRole.ANYONE in allowed:
            return ANYONE
        caller = self._keys.caller(key or other_key, self._now())
        if caller.role not in allowed:
            raise PermissionDenied(f"a key with the role {caller.role.value} may not request {path[:200]}")
        return caller

    def _check_host(self, sent: str) -> None:
        # Against DNS rebinding: the owner of a web page can let its host name resolve to 127.0.0.1. The page could then
        # call the servers on the machine of the person who views it.
        if self._takes_any_host:
            return
        name = _without_port(sent.strip().lower())
        if not is_loopback(name) and name not in self._hosts:
            raise PermissionDenied(f"host {sent[:80]!r} is not served here: add it to --allowed-hosts to serve it")


def key_from_authorization(authorization: str) -> str:
    """The key in an `authorization` header: `Bearer KEY`, or the password of `Basic`, which browsers send."""
    scheme, _, rest = authorization.partition(" ")
    if scheme.lower() != "basic":
        return bearer_key(authorization)
    try:
        return base64.b64decode(rest.strip(), validate=True).decode().partition(":")[2]
    except (binascii.Error, ValueError):
        return ""


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]
