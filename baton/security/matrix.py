"""The access table: which roles may call which RPC or page. An RPC that is not in the table is refused to everybody.

A caller's role comes from its certificate (routers, nodes and operators, between the processes of a cluster) or from
its API key (clients, monitors and operators, on the public ports). Without certificates and keys a port is open to all
who reach it, which is this machine alone unless the process was started with --insecure."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass

from baton.security.quotas import NO_QUOTAS, Quotas

_EVERY = "*"
"""Stands for every method of a service that has no entry of its own."""
OPERATOR_PATHS = frozenset(("/v1/load_lora_adapter", "/v1/unload_lora_adapter"))
"""Paths that are for operators alone, whatever their first segment says."""


class CallerRole(enum.Enum):
    """The role of a caller."""

    ROUTER = "router"
    NODE = "node"
    OPERATOR = "operator"
    CLIENT = "client"
    MONITOR = "monitor"
    """Reads metrics and the live page only: for Prometheus and for dashboards."""
    ANYONE = "anyone"
    """Any caller, also without a key, such as a health probe."""


KEY_ROLES = (CallerRole.CLIENT, CallerRole.MONITOR, CallerRole.OPERATOR)
CERTIFICATE_ROLES = (CallerRole.ROUTER, CallerRole.NODE, CallerRole.OPERATOR)
_ALL_WITH_KEY = frozenset(CallerRole) - {CallerRole.ANYONE}

RPCS: Mapping[tuple[str, str], frozenset[CallerRole]] = {
    ("baton.v1.Generation", _EVERY): frozenset({CallerRole.CLIENT, CallerRole.OPERATOR}),
    ("baton.v1.Operator", _EVERY): frozenset({CallerRole.OPERATOR}),
    # A router that starts calls the process that is registered under its name.
    ("baton.v1.Operator", "GetStatus"): frozenset({CallerRole.ROUTER, CallerRole.OPERATOR}),
    ("baton.v1.Node", "Attach"): frozenset({CallerRole.ROUTER}),
    # A node that starts calls the process that is registered under its name.
    ("baton.v1.Node", "Describe"): frozenset({CallerRole.ROUTER, CallerRole.NODE, CallerRole.OPERATOR}),
    ("baton.v1.Node", "Trace"): frozenset({CallerRole.ROUTER, CallerRole.OPERATOR}),
    ("baton.v1.Node", "Drain"): frozenset({CallerRole.ROUTER, CallerRole.OPERATOR}),
    ("baton.v1.Node", "SetRole"): frozenset({CallerRole.ROUTER, CallerRole.OPERATOR}),
    ("baton.v1.Node", "ResetPrefixCache"): frozenset({CallerRole.ROUTER, CallerRole.OPERATOR}),
    ("baton.v1.Node", "InspectAdapter"): frozenset({CallerRole.ROUTER, CallerRole.OPERATOR}),
    ("baton.v1.KvLink", "Open"): frozenset({CallerRole.NODE}),
    ("baton.v1.EncoderRows", "ReadRows"): frozenset({CallerRole.NODE}),
    ("grpc.health.v1.Health", _EVERY): frozenset({CallerRole.ANYONE}),
    ("grpc.reflection.v1.ServerReflection", _EVERY): _ALL_WITH_KEY,
    ("grpc.reflection.v1alpha.ServerReflection", _EVERY): _ALL_WITH_KEY,
}

PAGES: Mapping[str, frozenset[CallerRole]] = {
    "/livez": frozenset({CallerRole.ANYONE}),
    "/readyz": frozenset({CallerRole.ANYONE}),
    "/health": frozenset({CallerRole.ANYONE}),
    "/metrics": frozenset({CallerRole.MONITOR, CallerRole.OPERATOR}),
    "/ui": frozenset({CallerRole.MONITOR, CallerRole.OPERATOR}),
    "/": frozenset({CallerRole.ANYONE}),
    "/docs": frozenset({CallerRole.ANYONE}),
    "/openapi.json": frozenset({CallerRole.ANYONE}),
    "/version": _ALL_WITH_KEY,
    "/v1": frozenset({CallerRole.CLIENT, CallerRole.OPERATOR}),
    "/tokenize": frozenset({CallerRole.CLIENT, CallerRole.OPERATOR}),
    "/detokenize": frozenset({CallerRole.CLIENT, CallerRole.OPERATOR}),
    "/score": frozenset({CallerRole.CLIENT, CallerRole.OPERATOR}),
    "/rerank": frozenset({CallerRole.CLIENT, CallerRole.OPERATOR}),
    "/classify": frozenset({CallerRole.CLIENT, CallerRole.OPERATOR}),
    "/v2": frozenset({CallerRole.CLIENT, CallerRole.OPERATOR}),
}
"""The roles for each first segment of a path. A path with another first segment is not served: see `is_page`."""


def callers_of_rpc(method: str) -> frozenset[CallerRole]:
    """The roles that may call `/SERVICE/METHOD`."""
    service, _, name = method.removeprefix("/").partition("/")
    return RPCS.get((service, name)) or RPCS.get((service, _EVERY)) or frozenset()


def callers_of_page(path: str) -> frozenset[CallerRole]:
    """The roles that may request PATH by HTTP. For an unknown path these are all roles with a key, who get a 404."""
    # Compared part by part, since a server may serve these paths under some other spellings, too.
    if "/" + "/".join(part.lower() for part in path.split("/") if part) in OPERATOR_PATHS:
        return frozenset({CallerRole.OPERATOR})
    return PAGES.get(_first_part(path), _ALL_WITH_KEY)


def is_page(path: str) -> bool:
    """Whether the first segment of PATH is in the table, letter by letter.

    A server must not answer any other path: its URL routing may compare paths less exactly than this table does, and
    would then serve a page to callers whom the table excludes.
    """
    return _first_part(path) in PAGES


def _first_part(path: str) -> str:
    first = path.removeprefix("/").partition("/")[0]
    # A path that begins with an empty segment is not the path "/".
    return "/" + first if first or path == "/" else path


def certificate_name(role: CallerRole, cluster: str) -> str:
    """The DNS name in a certificate that gives this role in this cluster."""
    return f"{role.value}.{cluster}.baton"


def certificate_role(names: list[str], cluster: str) -> CallerRole | None:
    """The role that a certificate with these DNS names gives in the cluster; None: no role."""
    return next((role for role in CERTIFICATE_ROLES if certificate_name(role, cluster) in names), None)


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated caller."""

    role: CallerRole
    tenant: str = ""
    """The tenant, whose requests, cached prefixes and quota are separate from those of other tenants. Empty: no tenant.
    """
    key_id: str = ""
    """The name of the caller's API key in logs and commands; empty: the caller sent no key."""
    max_concurrent: int | None = None
    """Limit of concurrent requests of the tenant. None: no limit."""
    min_priority: int | None = None
    """The smallest priority that its requests may have. None: the router's setting says it."""
    weight: float = 1.0
    """How much of the service the tenant gets beside others that wait."""
    service_class: str = ""
    """The class of its requests, of `baton.security.quotas.KeyClass`; empty: their priority says it."""
    is_counted: bool = False
    """Whether the tenant's running requests are counted over all routers, since one of its keys has a limit of them."""
    tenant_quotas: Quotas = NO_QUOTAS
    key_quotas: Quotas = NO_QUOTAS

    @property
    def has_quotas(self) -> bool:
        """Whether its requests have to be counted beside those that other routers serve."""
        return self.is_counted or bool(self.tenant_quotas) or bool(self.key_quotas)


ANYONE = Caller(CallerRole.ANYONE)

current_caller: ContextVar[Caller] = ContextVar("current_caller", default=ANYONE)
