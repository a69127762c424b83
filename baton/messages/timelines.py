"""The stages of a request, and the duration of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class TimelineStage:
    """One stage of a request. Each stage begins when the stage before it ends."""

    name: str
    """admit, queue, prefill, transfer, decode, relay (between two processes), lost (attempts that failed), adopt (time
    spent for another router) or unfinished."""
    where: str
    """The process whose clock measured the stage; for a relay, both processes."""
    duration_ns: int
    after_first_token: bool = False


@dataclass(frozen=True, slots=True)
class Timeline:
    """The stages of one request. The durations up to the first token sum exactly to `ttft_ns`, all to `total_ns`."""

    request_id: str
    state: str
    """finished, failed or cancelled."""
    detail: str
    """stop or length, or the error."""
    age_s: float
    attempts: int
    prefill_node: str
    """The last attempt's prefill node; empty where the decode node computed the prompt, too."""
    decode_node: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    kv_bytes: int
    kv_read_ns: int
    """Time spent reading the KV, which mostly overlaps with the computation of the prompt."""
    ttft_ns: int | None
    """Time to the first token, from the request's arrival at the router; None: there was no token."""
    total_ns: int
    stages: Sequence[TimelineStage]
    trace_id: str = ""
    """Id of the trace that has the request's spans; empty: the request was not traced."""
    draft_tokens: int = 0
    """Tokens that were drafted and verified; see `Finished.draft_counts`."""
    accepted_draft_tokens: int = 0
    """The drafted tokens that are tokens of the output."""

    @property
    def starts_ns(self) -> Sequence[int]:
        """When each stage begins, in nanoseconds since the request's arrival at the router."""
        return [0, *accumulate(stage.duration_ns for stage in self.stages)][:-1]
