"""Authentication of HTTP requests: by the host name that was called and the key that was shown."""

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
"""Pairs of a header's name, in lower case, and its value."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
"""Control characters.

No served path has one, and some comparisons ignore them: `$` in a regular expression, C strings.
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
        """`host`: the server's address.

        `allowed_hosts`: host names besides those of loopback, with commas; `*`: any.
        """
        named = {name.strip().lower() for name in allowed_hosts.split(",") if name.strip()}
        self._takes_any_host = "*" in named or not (named or is_loopback(host))
        self._hosts = named
        self._keys = keys
        self._now = now

    def check(self, path: str, headers: Headers) -> Caller:
        """The caller of PATH, which is percent-decoded. Raises InvalidRequest, Unauthenticated or PermissionDenied."""
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
        # DNS rebinding: a web page can let its own name point to 127.0.0.1, and then call the servers that listen
        # there.
        if self._takes_any_host:
            return
        name = _without_port(sent.strip().lower())
        if not is_loopback(name) and name not in self._hosts:
            raise PermissionDenied(f"host {sent[:80]!r} is not served here: --allowed-hosts names more")


def key_in(authorization: str) -> str:
    """The key in an `authorization` header: `Bearer KEY`, or the password of `Basic`, which browsers send."""
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
