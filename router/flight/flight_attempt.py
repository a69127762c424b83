"""What a flight knows of its attempts: the legs of the running one, and how many attempts may fail.

A leg is one node's part of the running attempt, with what the node has said of it. The budget decides by rule 5 of
`router.flight.flight`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

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


MAX_FAILURES: Final = 3
"""The failed attempt with this number is the last attempt."""
MAX_REFUSALS: Final = 8
"""The most attempts that nodes refuse, or that are lost with a node which had not acknowledged them."""
MAX_UNRELATED_LOSSES: Final = 64
"""The most attempts that are lost together with nodes which the flight never used."""
REFILL_TOKENS: Final = 256
"""New tokens at the client since the last failure after which the earlier failures are forgotten. A request whose
every attempt kills its node ends if the attempts bring fewer than that; a stream that outlives nodes hours apart brings
thousands."""


class AttemptBudget:
    """Counts a flight's attempts that failed.

    Each `charge_…` returns why no further attempt may be made, or an empty text. `num_tokens` is how many tokens the
    client has by then.
    """

    def __init__(self) -> None:
        self.excluded: set[str] = set()
        """Incarnations on which an attempt failed since the budget was refilled: the next attempts avoid them."""
        self._num_failures = 0
        self._num_refusals = 0
        self._num_unrelated_losses = 0
        self._tokens_at_failure = 0
        """How many tokens the client had when an attempt failed last."""

    def charge_failure(self, num_tokens: int) -> str:
        """Charge an attempt that its node had acknowledged."""
        self._refill(num_tokens)
        self._num_failures += 1
        return f"{self._num_failures} attempts failed" if self._num_failures >= MAX_FAILURES else ""

    def charge_refusal(self, num_tokens: int) -> str:
        """Charge an attempt that its node refused or never acknowledged."""
        self._refill(num_tokens)
        self._num_refusals += 1
        return f"taken by none of {self._num_refusals} nodes" if self._num_refusals > MAX_REFUSALS else ""

    def charge_unrelated_loss(self, num_tokens: int) -> str:
        """Charge an attempt whose node was lost together with nodes that the flight never used."""
        self._refill(num_tokens)
        self._num_unrelated_losses += 1
        is_spent = self._num_unrelated_losses > MAX_UNRELATED_LOSSES
        return f"{self._num_unrelated_losses} attempts were lost with many nodes" if is_spent else ""

    def _refill(self, num_tokens: int) -> None:
        """Forget earlier failures if the client got enough tokens since the last one."""
        if num_tokens - self._tokens_at_failure >= REFILL_TOKENS:
            self._num_failures = self._num_refusals = self._num_unrelated_losses = 0
            self.excluded.clear()
        self._tokens_at_failure = num_tokens
