"""Who is calling: set at the door, read where it matters. Follows a call through its task and those that it starts."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass

from baton.security.matrix import CallerRole


@dataclass(frozen=True, slots=True)
class Caller:
    """Somebody with a key."""

    role: CallerRole
    tenant: str = ""
    """Whose requests, cached prefixes and quota are apart from everybody else's; empty: nobody's in particular."""
    key_id: str = ""
    max_concurrent: int | None = None
    """How many requests of the tenant may run at once; None: any number."""


ANYONE = Caller(CallerRole.ANYONE)

current_caller: ContextVar[Caller] = ContextVar("current_caller", default=ANYONE)
