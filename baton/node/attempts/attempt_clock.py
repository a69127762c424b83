"""Records when one attempt reached each stage on this node, and computes a client's timings from that."""

from __future__ import annotations

from dataclasses import dataclass

from baton.engine.batch import EngineCoreEvent, EngineCoreEventType
from baton.messages.node import Outcome, StageTimings


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
