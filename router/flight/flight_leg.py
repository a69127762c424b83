"""A leg: one node's part of a flight's running attempt, and what the node has said of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from baton.messages.node import Leg, NodeDescription, Outcome, StageTimings


class AttemptTimings(NamedTuple):
    """The timings of one attempt that its nodes have reported."""

    prompt_node: str = ""
    """The name of the node that computes the prompt."""
    prompt: StageTimings | None = None
    """None: that node has not reported any yet."""
    decode_node: str = ""
    """The name of the node that decodes; empty: the same node does."""
    decode: StageTimings | None = None
    """None: that node has not reported any yet, or the same node decodes."""
    is_complete: bool = False
    """Whether the node that decodes has reported the end of its leg."""

    @property
    def of_prompt(self) -> StageTimings:
        """The timings of the node that computed the prompt, which may be the one that decodes; all 0 if none are known.

        If KV does not arrive, the node that decodes computes the prompt itself.
        """
        if self.prompt is None and self.decode is not None and self.decode.prefill_ms > 0:
            return self.decode
        return self.prompt or StageTimings()


@dataclass(slots=True)
class FlightLeg:
    """One node's part of the running attempt."""

    node: NodeDescription
    kind: Leg
    num_sequences: int
    """How many of the request's sequences the node runs."""
    ended_sequences: set[int] = field(default_factory=set)
    """Indices of the sequences whose end the node has reported."""
    aborted_sequences: set[int] = field(default_factory=set)
    """Indices of the sequences for which the node was sent an abort."""
    outcome: Outcome | None = None
    """How the whole leg ended; None: it has not ended."""
    is_acknowledged: bool = False
    """Whether the node has reported anything about the leg, so that it surely has it."""
    is_lost: bool = False
    """Whether its node is gone."""
    is_released: bool = False
    """Whether LegEnded was returned for it: it does not count towards its node's load any more."""
    timings: StageTimings | None = None
    prompt_timings: StageTimings | None = None
    """What the node, which decodes, has said of the one that computed the prompt."""

    @property
    def is_running(self) -> bool:
        return self.outcome is None and not self.is_lost

    def note_outcome(self, sequence_index: int, outcome: Outcome) -> bool:
        """Note the end of one sequence, or of all if the outcome says so; returns whether the whole leg has ended."""
        self.ended_sequences.add(sequence_index)
        if not outcome.ends_one_sequence or len(self.ended_sequences) == self.num_sequences:
            self.outcome = outcome
        return self.outcome is not None

    @property
    def may_hold_blocks(self) -> bool:
        """Whether its node may still hold blocks for it, so that an abort is useful.

        A computed prompt stays on offer until a decode node has read it, also when its first token was the last one.
        """
        if self.is_lost or self.outcome is None:
            return not self.is_lost
        return self.kind is Leg.PREFILL and self.outcome in (Outcome.HANDED_OFF, Outcome.STOP, Outcome.LENGTH)
