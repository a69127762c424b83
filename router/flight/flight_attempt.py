"""What a flight knows of its attempts: the legs of the running one, and how many attempts may fail.

A leg is one node's part of the running attempt, with what the node has said of it. The budget decides by rule 5 of
`router.flight.flight`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from baton.messages.generation import Path
from baton.messages.ids import AttemptKey
from baton.messages.node import Abort, Leg, NodeDescription, Outcome, StageTimings, Submit
from baton.messages.request_spec import RequestSpec
from router.admission.request import ValidRequest
from router.flight.flight_table import AbortLeg, FlightEffect, LegEnded, SubmitLeg
from router.placement.placement import Placement


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
    moved_from: str = ""
    """The name of the node that had the stream before it was moved to the one that decodes; empty: it was not."""

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
    is_counted: bool = True
    """Whether it counts towards its node's load: no LegEnded was returned for it yet."""
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


class Attempt:
    """The running or next attempt of a flight: its nodes, once it has any, and the messages to them."""

    __slots__ = (
        "computed_by",
        "cut_by",
        "decode_has_sent_tokens",
        "given",
        "is_adopting",
        "key",
        "legs",
        "num_given",
        "placement",
        "request",
        "why_prefill_unknown",
    )

    def __init__(
        self,
        request: ValidRequest,
        key: AttemptKey,
        placement: Placement | None = None,
        given: Sequence[int] = (),
        num_given: int | None = None,
        before: Attempt | None = None,
        cut_by: int = 0,
    ) -> None:
        """`placement`: None: it has no nodes yet, and `before` is the attempt before it, if there is one.

        `given`: output tokens that its nodes are given with the prompt; `num_given`: how many they were given, if
        another router began the attempt, whose nodes may still replay what they computed. `cut_by`: see
        `Submit.cut_by`.
        """
        self.cut_by = cut_by
        self.request = request
        self.key = key
        self.placement: Placement | None = before.placement if before is not None else placement
        """Its nodes; as long as it has no legs, those of the attempt before."""
        self.given = given
        self.num_given = len(given) if num_given is None else num_given
        """Number of output tokens that its nodes were given with the prompt."""
        self.is_adopting = num_given is not None
        """Whether it was begun by another router, and its nodes may still replay what they computed."""
        self.computed_by = ""
        """The node that computed the prompt of a stream that was moved, by name; empty: a node of this attempt."""
        self.why_prefill_unknown = ""
        """Why the prefill leg could not be adopted: the attempt is lost if its decode leg has no token yet."""
        self.decode_has_sent_tokens = False
        self.legs: dict[str, FlightLeg] = {}
        """By incarnation; the one that decodes is the last."""
        if placement is not None:
            prefill, decode, num_sequences = placement.prefill, placement.decode, request.sampling_params.n
            if prefill is not None:
                self.legs[prefill.incarnation] = FlightLeg(prefill, Leg.PREFILL, 1)
            alone = Leg.EMBED if request.embeds else Leg.WHOLE
            kind = alone if prefill is None else Leg.DECODE
            self.legs[decode.incarnation] = FlightLeg(decode, kind, num_sequences)

    def is_prefill_done(self, num_tokens: int) -> bool:
        """Whether the decode leg has sent tokens and none before them is missing: the prefill leg has done its part.

        `num_tokens`: how many tokens of the first sequence the client has.
        """
        return self.decode_has_sent_tokens and num_tokens > self.num_given

    def timings(self) -> AttemptTimings:
        """What its nodes have reported so far.

        Reports of two nodes come in any order. The one that decodes may bring the other's timings, too.
        """
        if not self.legs:
            return AttemptTimings()
        *prefill, last = self.legs.values()
        name, has_ended = last.node.node_id, last.outcome is not None
        if not prefill:
            return AttemptTimings(name, last.timings, is_complete=has_ended)
        prompt, before = prefill[0].timings or last.prompt_timings, prefill[0].node.node_id
        moved_from = before if self.computed_by else ""
        return AttemptTimings(self.computed_by or before, prompt, name, last.timings, has_ended, moved_from)

    def stage_timings(self) -> StageTimings:
        """The prompt's timings from the node that computed it, the transfer's from the node that read the blocks."""
        reported = self.timings()
        prompt, pulled = reported.of_prompt, reported.decode or StageTimings()
        return StageTimings(
            queue_ms=prompt.queue_ms,
            prefill_ms=prompt.prefill_ms,
            transfer_ms=pulled.transfer_ms,
            cached_tokens=prompt.cached_tokens + (0 if prompt is reported.decode else prompt.external_tokens),
            external_tokens=pulled.external_tokens,
            kv_bytes=pulled.kv_bytes,
        )

    def path(self) -> Path:
        """The nodes of the answer."""
        placement = self.placement
        if placement is None:
            return Path("", "", self.key.attempt, "")
        decode = placement.decode.node_id
        prefill = self.computed_by or (placement.prefill.node_id if placement.prefill else "")
        # A stream may have moved back to the node that computed its prompt.
        return Path(prefill if prefill != decode else "", decode, self.key.attempt, placement.reason.text)

    # --- messages to its nodes ---

    def submissions(self, takeover: int, turn: float | None = None) -> list[FlightEffect]:
        """The legs, to be sent to their nodes. `turn`: see `Submit.turn`."""
        legs = self.legs.values()
        return [SubmitLeg(leg.node.incarnation, self.submission(leg.kind, takeover, turn)) for leg in legs]

    def submission(self, leg: Leg, takeover: int, turn: float | None = None) -> Submit:
        """The message with which the node of a leg gets it."""
        placement = self.placement
        prefill = placement.prefill if placement else None
        reader_block_size = 0
        if placement and prefill and leg is Leg.PREFILL and placement.decode.block_size != prefill.block_size:
            reader_block_size = placement.decode.block_size
        return Submit(
            attempt=self.key,
            leg=leg,
            # A decode node needs the rows, too: it computes the prompt again if it is preempted or its load is lost.
            spec=self._spec(leg),
            kv_source=prefill.as_peer if prefill and leg is Leg.DECODE else None,
            output_token_ids=self.given,
            takeover=takeover,
            reader_block_size=reader_block_size,
            turn=turn,
            held_prefix=placement.held_prefix if placement and leg is not Leg.DECODE else None,
            cut_by=self.cut_by if leg is Leg.DECODE else 0,
            kv_bits=placement.kv_bits if placement and leg is Leg.DECODE else "",
        )

    def _spec(self, leg: Leg) -> RequestSpec:
        """The request; the node that computes its prompt hears who has rows of the contents, or makes them."""
        if self.placement is None or leg is Leg.DECODE or not (self.placement.holders or self.placement.encoders):
            return self.request
        holders, encoders = dict(self.placement.holders), dict(self.placement.encoders)
        contents = [
            replace(content, held_by=holders.get(content.digest), encoded_by=encoders.get(content.digest))
            for content in self.request.contents
        ]
        return replace(self.request, contents=contents)

    def abort_sequence(self, leg: FlightLeg, index: int, takeover: int) -> list[FlightEffect]:
        """Tell a node that one of the sequences is over, unless it was told so."""
        if leg.kind is Leg.PREFILL or index in leg.aborted_sequences:
            return []
        leg.aborted_sequences.add(index)
        return [AbortLeg(leg.node.incarnation, Abort(self.key, "its text is over", index, takeover))]

    def end(self, reason: str, takeover: int, *, keep_handed_off: bool = False) -> list[FlightEffect]:
        """Abort the legs that may still hold blocks, and end all. `keep_handed_off`: prefill legs that were handed
        off are not aborted, since the decode node has read their blocks.
        """
        abort = Abort(self.key, reason, takeover=takeover)
        aborts: list[FlightEffect] = [
            AbortLeg(leg.node.incarnation, abort)
            for leg in self.legs.values()
            if leg.may_hold_blocks and not (keep_handed_off and leg.outcome is Outcome.HANDED_OFF)
        ]
        return aborts + self.end_legs()

    def end_legs(self) -> list[FlightEffect]:
        """No leg counts towards its node's load any more."""
        return [effect for leg in self.legs.values() for effect in self.end_leg(leg)]

    def end_leg(self, leg: FlightLeg) -> list[FlightEffect]:
        """The leg does not count towards its node's load any more. Idempotent."""
        if not leg.is_counted:
            return []
        leg.is_counted = False
        return [LegEnded(leg.node.incarnation, self.key)]


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
