"""Who may call what: the whole table. What is not in it, nobody may call.

A caller is what its certificate says (routers, nodes and operators, between a cluster's processes) or what its key says
(clients, monitors and operators, on the ports for people). Without certificates and keys a port is open to whoever
reaches it, which is this machine alone unless somebody said --insecure.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping


class CallerRole(enum.Enum):
    """What a caller is."""

    ROUTER = "router"
    NODE = "node"
    OPERATOR = "operator"
    CLIENT = "client"
    MONITOR = "monitor"
    """Reads figures and the live page, and nothing else: for Prometheus and for screens on walls."""
    ANYONE = "anyone"
    """Whoever asks, also without a key: probes."""


KEY_ROLES = (CallerRole.CLIENT, CallerRole.MONITOR, CallerRole.OPERATOR)
CERTIFICATE_ROLES = (CallerRole.ROUTER, CallerRole.NODE, CallerRole.OPERATOR)
_EVERY = "*"
_KNOWN = frozenset(CallerRole) - {CallerRole.ANYONE}

RPCS: Mapping[tuple[str, str], frozenset[CallerRole]] = {
    ("baton.v1.Generation", _EVERY): frozenset({CallerRole.CLIENT, CallerRole.OPERATOR}),
    ("baton.v1.Operator", _EVERY): frozenset({CallerRole.OPERATOR}),
    # Routers, too: one that starts asks whoever has its name.
    ("baton.v1.Operator", "GetStatus"): frozenset({CallerRole.ROUTER, CallerRole.OPERATOR}),
    ("baton.v1.Node", "Attach"): frozenset({CallerRole.ROUTER}),
    # Nodes, too: one that starts asks whoever has its name.
    ("baton.v1.Node", "Describe"): frozenset({CallerRole.ROUTER, CallerRole.NODE, CallerRole.OPERATOR}),
    ("baton.v1.Node", "Trace"): frozenset({CallerRole.ROUTER, CallerRole.OPERATOR}),
    ("baton.v1.Node", "Drain"): frozenset({CallerRole.ROUTER, CallerRole.OPERATOR}),
    ("baton.v1.Node", "SetRole"): frozenset({CallerRole.ROUTER, CallerRole.OPERATOR}),
    ("baton.v1.Node", "ResetPrefixCache"): frozenset({CallerRole.ROUTER, CallerRole.OPERATOR}),
    ("baton.v1.KvLink", "Open"): frozenset({CallerRole.NODE}),
    ("grpc.health.v1.Health", _EVERY): frozenset({CallerRole.ANYONE}),
    ("grpc.reflection.v1.ServerReflection", _EVERY): _KNOWN,
    ("grpc.reflection.v1alpha.ServerReflection", _EVERY): _KNOWN,
}

PAGES: Mapping[str, frozenset[CallerRole]] = {
    "/livez": frozenset({CallerRole.ANYONE}),
    "/readyz": frozenset({CallerRole.ANYONE}),
    "/health": frozenset({CallerRole.ANYONE}),
    "/metrics": frozenset({CallerRole.MONITOR, CallerRole.OPERATOR}),
    "/ui": frozenset({CallerRole.MONITOR, CallerRole.OPERATOR}),
    "/v1": frozenset({CallerRole.CLIENT, CallerRole.OPERATOR}),
}
"""By the first part of the path. A path whose first part is not here leads nowhere: see `is_page`."""


def callers_of_rpc(method: str) -> frozenset[CallerRole]:
    """Who may call `/SERVICE/METHOD`."""
    service, _, name = method.removeprefix("/").partition("/")
    return RPCS.get((service, name)) or RPCS.get((service, _EVERY)) or frozenset()


def callers_of_page(path: str) -> frozenset[CallerRole]:
    """Who may ask HTTP for PATH. A path of nobody's is anybody's with a key, who then hears that it is none."""
    return PAGES.get(_first_part(path), _KNOWN)


def is_page(path: str) -> bool:
    """Whether the table has the first part of PATH, letter by letter.

    No server may answer a path without it: what looks for the page may be less exact than this table, and would then
    answer callers that the table keeps away.
    """
    return _first_part(path) in PAGES


def _first_part(path: str) -> str:
    return "/" + path.removeprefix("/").partition("/")[0]


def certificate_name(role: CallerRole, cluster: str) -> str:
    """The DNS name in the certificate of whoever has this role in this cluster."""
    return f"{role.value}.{cluster}.baton"


def certificate_role(names: list[str], cluster: str) -> CallerRole | None:
    """The role that a certificate with these DNS names has in the cluster."""
    return next((role for role in CERTIFICATE_ROLES if certificate_name(role, cluster) in names), None)
