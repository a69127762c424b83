"""What a flight knows of one node's part of its running attempt."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from baton.messages.node import Leg, NodeDescription, Outcome, StageTimings


class Measured(NamedTuple):
    """What the nodes of an attempt have said of it."""

    prompt_node: str = ""
    """Where the prompt is computed."""
    prompt: StageTimings | None = None
    """None where it has said nothing; so is the next one."""
    decode_node: str = ""
    """Empty where the same node decodes."""
    decode: StageTimings | None = None
    is_complete: bool = False
    """Whether the node that decodes has said how it ended there."""


@dataclass(slots=True)
class FlightLeg:
    """One node's part of the running attempt."""

    node: NodeDescription
    leg: Leg
    num_sequences: int
    """How many of the request's sequences it runs."""
    ended_sequences: set[int] = field(default_factory=set)
    told_sequences: set[int] = field(default_factory=set)
    """Those that the node knows to be over."""
    outcome: Outcome | None = None
    taken: bool = False
    """The node has said something of it, if only that it is there."""
    lost: bool = False
    released: bool = False
    """Was said to be ended: it counts no more towards its node's load."""
    timings: StageTimings | None = None

    @property
    def is_running(self) -> bool:
        return self.outcome is None and not self.lost

    def note_outcome(self, sequence_index: int, outcome: Outcome) -> bool:
        """One of its sequences ended, or all of them did with it; whether nothing runs there any more."""
        self.ended_sequences.add(sequence_index)
        if not outcome.ends_one_sequence or len(self.ended_sequences) == self.num_sequences:
            self.outcome = outcome
        return self.outcome is not None

    @property
    def may_hold_blocks(self) -> bool:
        """A computed prompt stays on offer until a decode node has it, also when its first token was the last one."""
        if self.lost or self.outcome is None:
            return not self.lost
        return self.leg is Leg.PREFILL and self.outcome in (Outcome.HANDED_OFF, Outcome.STOP, Outcome.LENGTH)
