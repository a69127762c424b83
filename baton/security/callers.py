"""The identity of the caller. It is set when a call is authenticated, for the task of the call and its subtasks."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass

from baton.security.matrix import CallerRole


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


ANYONE = Caller(CallerRole.ANYONE)

current_caller: ContextVar[Caller] = ContextVar("current_caller", default=ANYONE)
