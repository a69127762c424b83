"""Who comes in: the check before every call of a server. One look-up a call, nothing for what the call then sends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import grpc

from baton.errors import PermissionDenied
from baton.security.callers import ANYONE, Caller, current_caller
from baton.security.keys import KeyRing, bearer
from baton.security.matrix import CallerRole, callers_of_rpc, certificate_role


class Door:
    """The rules of one server. Without keys and without a cluster it stands open."""

    def __init__(
        self, keys: KeyRing | None = None, cluster: str | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        """`keys`: callers must show one. `cluster`: they must show a certificate with a role in it."""
        self._keys = keys
        self._cluster = cluster
        self._now = now

    def check_key(self, method: str, metadata: Iterable[tuple[str, str | bytes]] | None) -> None:
        """Raises Unauthenticated or PermissionDenied; says to whoever asks in this task who is calling."""
        caller = self.caller(method, metadata)
        if caller is not ANYONE:
            current_caller.set(caller)

    def caller(self, method: str, metadata: Iterable[tuple[str, str | bytes]] | None) -> Caller:
        """Who is calling, ANYONE where that does not matter; raises Unauthenticated or PermissionDenied."""
        if self._keys is None:
            return ANYONE
        allowed = callers_of_rpc(method)
        if CallerRole.ANYONE in allowed:
            return ANYONE
        sent = next((value for key, value in metadata or () if key == "authorization"), "")
        caller = self._keys.caller(bearer(sent) if isinstance(sent, str) else "", self._now())
        if caller.role not in allowed:
            raise PermissionDenied(f"{method} is not for a {caller.role.value}'s key")
        return caller

    @staticmethod
    def is_open_to_anyone(method: str) -> bool:
        """Whether also those may call it who show nothing: then who calls it has not shown to be anybody."""
        return CallerRole.ANYONE in callers_of_rpc(method)

    def check_certificate(self, method: str, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Raises PermissionDenied when the certificate's role may not call this."""
        if self._cluster is None:
            return
        names = [name.decode(errors="replace") for name in context.auth_context().get("peer_dns", ())]
        role = certificate_role(names, self._cluster)
        if role not in callers_of_rpc(method):
            who = f"a {role.value} of cluster {self._cluster!r}" if role else f"in no role of cluster {self._cluster!r}"
            raise PermissionDenied(f"{method} is not for {', '.join(names)[:200] or 'the nameless'}, {who}")
