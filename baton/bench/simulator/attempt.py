"""What a simulated node knows of one attempt."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.engine.request import Request
from baton.messages.ids import AttemptKey
from baton.messages.node import Leg


@dataclass(slots=True)
class Attempt:
    """A node's state of one attempt."""

    key: AttemptKey
    request: Request
    leg: Leg
    submitted_at: float
    num_reported: int
    """Output tokens that the router knows."""
    scheduled_at: float | None = None
    first_unreported_step: int | None = None
    """While it draws a token in each step: the number of the node's step that drew the first unreported one."""
    times: list[float] = field(default_factory=list)
    """When earlier unreported tokens were drawn."""
    first_token_at: float | None = None
    num_cached_tokens: int = 0
    num_external_tokens: int = 0
