"""Authenticates the calls to a gRPC server, before their requests are read."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import grpc

from baton.errors import PermissionDenied
from baton.security.keys import KeyRing, bearer_key
from baton.security.matrix import ANYONE, Caller, CallerRole, callers_of_rpc, certificate_role, current_caller


class Authenticator:
    """The access rules of one server. Without keys and without a cluster every caller is permitted."""

    def __init__(
        self, keys: KeyRing | None = None, cluster: str | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        """`keys`: callers must send one of these keys; None: keys are not checked. `cluster`: callers must show a
        certificate with a role in this cluster; None: certificates are not checked.
        """
        self._keys = keys
        self._cluster = cluster
        self._now = now

    def check_key(self, method: str, metadata: Iterable[tuple[str, str | bytes]] | None) -> None:
        """Authenticate a call and set `current_caller` for its task. Raises Unauthenticated or PermissionDenied."""
        caller = self.caller(method, metadata)
        if caller is not ANYONE:
            current_caller.set(caller)

    def caller(self, method: str, metadata: Iterable[tuple[str, str | bytes]] | None) -> Caller:
        """The caller; ANYONE if no key is needed. Raises Unauthenticated or PermissionDenied."""
        if self._keys is None:
            return ANYONE
        allowed = callers_of_rpc(method)
        if CallerRole.ANYONE in allowed:
            return ANYONE
        sent = next((value for key, value in metadata or () if key == "authorization"), "")
        caller = self._keys.caller(bearer_key(sent) if isinstance(sent, str) else "", self._now())
        if caller.role not in allowed:
            raise PermissionDenied(f"a key with the role {caller.role.value} may not call {method}")
        return caller

    @staticmethod
    def is_open_to_anyone(method: str) -> bool:
        """Whether callers without a key may call the method, so that its callers are not identified."""
        return CallerRole.ANYONE in callers_of_rpc(method)

    def check_certificate(self, method: str, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Raise PermissionDenied if the role in the caller's certificate may not call the method."""
        if self._cluster is None:
            return
        names = [name.decode(errors="replace") for name in context.auth_context().get("peer_dns", ())]
        role = certificate_role(names, self._cluster)
        if role not in callers_of_rpc(method):
            shown = f"a certificate for {', '.join(names)[:200]}" if names else "a certificate without names"
            known_as = f"the role {role.value}" if role else "no role"
            raise PermissionDenied(f"{shown} may not call {method}: it has {known_as} in cluster {self._cluster!r}")
