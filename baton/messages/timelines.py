"""Where a request's time went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class TimelineStage:
    """A part of a request's time; it begins where the one before it ends."""

    name: str
    """admit, queue, prefill, transfer, decode, relay (between two processes), lost (attempts that failed), adopt (what
    ran for another router) or unfinished."""
    where: str
    """Whose clock measured it; of a relay, both ends."""
    duration_ns: int
    after_first_token: bool = False


@dataclass(frozen=True, slots=True)
class Timeline:
    """Where one request's time went. Its stages up to the first token sum up to `ttft_ns`, all of them to `total_ns`:
    exactly.
    """

    request_id: str
    state: str
    """finished, failed or cancelled."""
    detail: str
    """stop or length, or the error."""
    age_s: float
    attempts: int
    prefill_node: str
    """Of the last attempt. Empty where the decode node does it all."""
    decode_node: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    kv_bytes: int
    kv_read_ns: int
    """What reading them took, most of it while the prompt was computed."""
    ttft_ns: int | None
    """From the request's arrival at the router; None: there was no token."""
    total_ns: int
    stages: Sequence[TimelineStage]
    trace_id: str = ""
    """Of the trace that its spans are in; empty: it was not traced."""

    @property
    def starts_ns(self) -> Sequence[int]:
        """When each stage begins, from the request's arrival at the router."""
        return [0, *accumulate(stage.duration_ns for stage in self.stages)][:-1]
