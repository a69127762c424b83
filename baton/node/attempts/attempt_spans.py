"""Writes trace spans of the stages of attempts, for those attempts that their router traces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from baton.messages.ids import AttemptKey
from baton.messages.node import Leg, Submit
from baton.node.attempts.attempt_clock import AttemptClock
from baton.observe.tracing import Attributes, Tracer


class Stage(NamedTuple):
    """A part of an attempt's time here, in seconds on the node's clock."""

    name: str
    begun: float
    ended: float


def stages(clock: AttemptClock, leg: Leg, ended: float) -> Iterator[Stage]:
    """The stages of an attempt until it ended, one after the other, without gaps."""
    yield Stage("queue", clock.queued, clock.scheduled or ended)
    if not clock.scheduled:
        return
    # A decode leg whose KV did not come has computed its prompt itself.
    is_transferred = leg is Leg.DECODE and bool(clock.arrived or not clock.first_token)
    computed = clock.arrived if is_transferred else clock.first_token
    yield Stage("transfer" if is_transferred else "prefill", clock.scheduled, computed or ended)
    if computed and leg not in (Leg.PREFILL, Leg.EMBED):
        yield Stage("decode", computed, ended)


class AttemptSpans:
    """The attempts of one node that are traced and have not ended."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._open: dict[AttemptKey, tuple[str, Leg, AttemptClock]] = {}

    def begun(self, submit: Submit, clock: AttemptClock) -> None:
        """An attempt has begun on this node; it is remembered if its router traces it."""
        if submit.traceparent:
            self._open[submit.attempt] = submit.traceparent, submit.leg, clock

    def ended(self, attempt: AttemptKey, now: float, error: str = "") -> None:
        """An attempt has ended; one that is not traced is ignored. `error`: why its last stage failed."""
        traceparent, leg, clock = self._open.pop(attempt, ("", Leg.WHOLE, None))
        if clock is None:
            return
        attributes: Attributes = {"baton.request_id": attempt.request_id, "baton.attempt": attempt.attempt}
        found = list(stages(clock, leg, now))
        for stage in found:
            stage_error = error if stage is found[-1] else ""
            self._tracer.completed(stage.name, traceparent, stage.begun, stage.ended, attributes, stage_error)
