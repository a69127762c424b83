"""When an attempt reached each stage on this node: a client's timings, and trace spans if its router traces it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from baton.engine.batch import EngineCoreEvent, EngineCoreEventType
from baton.messages.ids import AttemptKey
from baton.messages.node import Leg, Outcome, StageTimings, Submit
from baton.observe.tracing import Attributes, Tracer


@dataclass(frozen=True, slots=True)
class TransferFigures:
    """How much KV was read into this node for one attempt, and how long its reads took."""

    kv_bytes: int
    transfer_ms: float
    prompt_timings: StageTimings | None = None
    """What the node that computed the prompt measured of the attempt; None: its version does not say it."""


@dataclass(slots=True)
class AttemptClock:
    """When one attempt reached its stages, in seconds on CLOCK_MONOTONIC; 0 for a stage that is not reached."""

    queued: float = 0.0
    scheduled: float = 0.0
    first_token: float = 0.0
    arrived: float = 0.0
    num_sequences: int = 1
    """Number of its sequences that have not ended on this node."""

    def note(self, event: EngineCoreEvent) -> None:
        """Record an event of this attempt; only the first of each type counts, since a preemption repeats some."""
        if event.type is EngineCoreEventType.QUEUED:
            self.queued = self.queued or event.time
        elif event.type in (EngineCoreEventType.SCHEDULED, EngineCoreEventType.REMOTE_KV_REQUESTED):
            self.scheduled = self.scheduled or event.time
        elif event.type is EngineCoreEventType.FIRST_TOKEN:
            self.first_token = self.first_token or event.time
        elif event.type is EngineCoreEventType.REMOTE_KV_ARRIVED:
            self.arrived = self.arrived or event.time

    def sequence_ended(self, outcome: Outcome) -> bool:
        """One of its sequences ended; returns whether none of the attempt runs here any more."""
        self.num_sequences -= 1
        return self.num_sequences <= 0 or not outcome.ends_one_sequence

    def timings(
        self, now: float, cached_tokens: int, external_tokens: int, moved: TransferFigures | None
    ) -> StageTimings:
        """The timings as a router is told them. `now`: seconds on CLOCK_MONOTONIC."""
        # Where KV arrived, the first token says nothing of the prompt: that of a beam search comes long after.
        computed = self.first_token if not self.arrived else 0.0
        return StageTimings(
            queue_ms=max(0.0, self.scheduled - self.queued) * 1e3 if self.scheduled else 0.0,
            prefill_ms=max(0.0, computed - self.scheduled) * 1e3 if computed else 0.0,
            transfer_ms=moved.transfer_ms if moved else 0.0,
            cached_tokens=cached_tokens,
            external_tokens=external_tokens,
            kv_bytes=moved.kv_bytes if moved else 0,
            intake_ms=max(0.0, self.arrived - self.scheduled) * 1e3 if self.arrived else 0.0,
            decode_ms=self.decode_ms(now),
        )

    def decode_ms(self, now: float) -> float:
        """Milliseconds since the prompt was computed here or its KV had arrived."""
        since = self.arrived or self.first_token
        return max(0.0, now - since) * 1e3 if since else 0.0


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
        spans = list(stages(clock, leg, now))
        for stage in spans:
            stage_error = error if stage is spans[-1] else ""
            self._tracer.completed(stage.name, traceparent, stage.begun, stage.ended, attributes, stage_error)
