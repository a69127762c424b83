"""When one attempt reached which stage on this node: turns the engine's events into a client's timings."""

from __future__ import annotations

from dataclasses import dataclass

from baton.engine.batch import EngineCoreEvent, EngineCoreEventType
from baton.messages.node import Outcome, StageTimings


@dataclass(frozen=True, slots=True)
class TransferFigures:
    """What moved into this node for one attempt."""

    kv_bytes: int
    transfer_ms: float


@dataclass(slots=True)
class AttemptClock:
    """Stages of one attempt, seconds on CLOCK_MONOTONIC; 0 while not reached."""

    queued: float = 0.0
    scheduled: float = 0.0
    first_token: float = 0.0
    arrived: float = 0.0
    num_sequences: int = 1
    """How many of its sequences have not ended here."""

    def note(self, event: EngineCoreEvent) -> None:
        """Take an event of this attempt; only the first of its kind counts (preemption repeats some)."""
        if event.type is EngineCoreEventType.QUEUED:
            self.queued = self.queued or event.time
        elif event.type in (EngineCoreEventType.SCHEDULED, EngineCoreEventType.REMOTE_KV_REQUESTED):
            self.scheduled = self.scheduled or event.time
        elif event.type is EngineCoreEventType.FIRST_TOKEN:
            self.first_token = self.first_token or event.time
        elif event.type is EngineCoreEventType.REMOTE_KV_ARRIVED:
            self.arrived = self.arrived or event.time

    def ended(self, outcome: Outcome) -> bool:
        """One of its sequences ended so; whether nothing of the attempt runs here any more."""
        self.num_sequences -= 1
        return self.num_sequences <= 0 or not outcome.ends_one_sequence

    def timings(
        self, now: float, cached_tokens: int, external_tokens: int, moved: TransferFigures | None
    ) -> StageTimings:
        """What a router is told."""
        # A beam search's first token comes long after its prompt's KV.
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
        """Since the prompt was computed or had arrived here."""
        since = self.arrived or self.first_token
        return max(0.0, now - since) * 1e3 if since else 0.0
