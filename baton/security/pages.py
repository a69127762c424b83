"""Who comes in by HTTP: the name that was called, the key that was shown."""

from __future__ import annotations

import base64
import binascii
import re
import time
from collections.abc import Callable, Iterable

from baton.errors import InvalidRequest, PermissionDenied
from baton.security.binds import is_loopback
from baton.security.callers import ANYONE, Caller
from baton.security.keys import KeyRing, bearer
from baton.security.matrix import CallerRole, callers_of_page

Headers = Iterable[tuple[bytes, bytes]]
"""Names in small letters."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
"""No path of ours has one, and what compares paths may skip one: `$` of a regular expression, the end of a C string."""


class PageDoor:
    """The rules of one HTTP server."""

    def __init__(
        self,
        host: str = "",
        allowed_hosts: str = "",
        keys: KeyRing | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`host`: where it listens. `allowed_hosts`: names besides those of loopback, with commas; `*`: any."""
        named = {name.strip().lower() for name in allowed_hosts.split(",") if name.strip()}
        self._takes_any_host = "*" in named or not (named or is_loopback(host))
        self._hosts = named
        self._keys = keys
        self._now = now

    def check(self, path: str, headers: Headers) -> Caller:
        """Who is calling for PATH, which is decoded; raises InvalidRequest, Unauthenticated or PermissionDenied."""
        if _CONTROL.search(path):
            raise InvalidRequest("path", f"has a control character: {path[:200]!r}")
        key = ""
        for name, value in headers:
            if name == b"host":
                self._check_host(value.decode("latin-1"))
            elif name == b"authorization":
                key = key_in(value.decode("latin-1"))
        allowed = callers_of_page(path)
        if self._keys is None or CallerRole.ANYONE in allowed:
            return ANYONE
        caller = self._keys.caller(key, self._now())
        if caller.role not in allowed:
            raise PermissionDenied(f"{path[:200]} is not for a {caller.role.value}'s key")
        return caller

    def _check_host(self, sent: str) -> None:
        # A page on the web can have its own name lead to 127.0.0.1, and then ask whatever listens there.
        if self._takes_any_host:
            return
        name = _without_port(sent.strip().lower())
        if not is_loopback(name) and name not in self._hosts:
            raise PermissionDenied(f"host {sent[:80]!r} is not served here: --allowed-hosts names more")


def key_in(authorization: str) -> str:
    """The key in a header: `Bearer KEY`, or what a browser sends of a name and a password, which is the key."""
    scheme, _, rest = authorization.partition(" ")
    if scheme.lower() != "basic":
        return bearer(authorization)
    try:
        return base64.b64decode(rest.strip(), validate=True).decode().partition(":")[2]
    except (binascii.Error, ValueError):
        return ""


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]
