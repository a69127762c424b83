"""A flight's stream on its way to another node, until that node has it or the move has failed. Pure.

The attempt on the other node reads KV while the stream goes on where it is. The node that has the stream ends it with
HANDED_OFF when nearly all is read. From then on the other attempt is the flight's running one. What that one brings
before, since two nodes' messages come in any order, is kept until then.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.messages.ids import AttemptKey
from baton.messages.node import Abort, Adopt, MoveOut, NodeDescription, Outcome, RequestDelta
from router.flight.flight_attempt import Attempt, FlightLeg
from router.flight.flight_table import AbortLeg, AdoptLeg, FlightEffect, MoveEnded, MoveStream, SubmitLeg
from router.placement.placement import Placement, kv_bits_of
from router.placement.reasons import MOVED


class PendingMove:
    """One move that is under way."""

    def __init__(
        self, before: Attempt, key: AttemptKey, to: NodeDescription, given: Sequence[int], cut_by: int
    ) -> None:
        """`before`: the attempt that has the stream. `key`: of the attempt that is to have it, which is submitted with
        the output tokens `given`. `cut_by`: see `MoveOut.cut_by`."""
        self.before = before
        *_, self.source = before.legs.values()
        """The leg that has the stream."""
        kv_bits = kv_bits_of(self.source.node, to, before.placement.kv_bits if before.placement else "")
        placement = Placement(self.source.node, to, MOVED, kv_bits=kv_bits)
        self.attempt = Attempt(before.request, key, placement, given, cut_by=cut_by)
        self.attempt.computed_by = before.path().prefill_node or self.source.node.node_id
        # The source is to this attempt what a prefill node is to others, once it has handed the stream over.
        handed = self.attempt.legs[self.source.node.incarnation]
        handed.outcome, handed.is_acknowledged, handed.is_counted = Outcome.HANDED_OFF, True, False
        handed.timings = before.timings().of_prompt
        self.early: list[RequestDelta] = []
        """What the other node has said so far."""

    @property
    def key(self) -> AttemptKey:
        """The key of the attempt that is to have the stream."""
        return self.attempt.key

    @property
    def leg(self) -> FlightLeg:
        """The leg that is to have the stream."""
        *_, leg = self.attempt.legs.values()
        return leg

    def begin(self, takeover: int) -> list[FlightEffect]:
        """Tell both nodes."""
        cut_by, num_tokens = self.attempt.cut_by, self.attempt.request.num_prompt_tokens + len(self.attempt.given)
        submit = self.attempt.submission(self.leg.kind, takeover)
        move = MoveOut(self.before.key, self.key, num_tokens, cut_by)
        return [
            SubmitLeg(self.leg.node.incarnation, submit),
            MoveStream(self.source.node.incarnation, move),
        ]

    def adopt(self, takeover: int) -> list[FlightEffect]:
        """The link to the other node was cut and is open again."""
        self.early.clear()
        return [AdoptLeg(self.leg.node.incarnation, Adopt(self.key, takeover), self.leg.num_sequences)]

    def end(self, why: str, takeover: int, *, is_over: bool) -> list[FlightEffect]:
        """Tell both nodes that the stream stays where it is. `is_over`: the flight's running attempt is, too."""
        abort = Abort(self.key, why or "the request is over", takeover=takeover)
        leg, effects = self.leg, list[FlightEffect]()
        if not self.source.is_lost:
            effects.append(AbortLeg(self.source.node.incarnation, abort))
        if leg.is_running:
            effects.append(AbortLeg(leg.node.incarnation, abort))
        return [*effects, *self.attempt.end_leg(leg), MoveEnded(self.key, None, "" if is_over else why)]
