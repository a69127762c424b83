"""A compact encoding of the reports on one stream from a node to a router.

Most of what a node reports is that a sequence got its next token. Both ends know from earlier reports which sequences
are running and in which order, so that a report only needs to carry the tokens. Everything else is sent as a
`RequestDelta`. `StepReport.next_token_ids` in node.proto defines the rule, and this module implements its two ends. The
stream is reliable and ordered, so that both ends always have the same state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from baton.errors import NodeLost
from baton.messages.ids import AttemptKey
from baton.messages.node import RequestDelta, StepReport
from baton.v1 import node_pb2 as node
from baton.wire.codec.node import report_from_pb, report_to_pb


class _RunningSequence:
    """A running sequence and the index of its next token."""

    __slots__ = ("attempt", "next_index", "sequence_index")

    def __init__(self, delta: RequestDelta) -> None:
        self.attempt = delta.attempt
        self.sequence_index = delta.sequence_index
        self.next_index = delta.first_index + len(delta.token_ids)


class ReportWriter:
    """The node's end: encodes reports."""

    def __init__(self) -> None:
        self._order: Sequence[_RunningSequence] = ()
        """The running sequences, in the order that both ends know."""
        self._places: dict[tuple[AttemptKey, int], int] = {}
        """The index of each sequence in `_order`."""

    def write(self, report: StepReport) -> node.StepReport:
        """Encode the next report of the stream."""
        order, places, tokens, other_deltas = self._order, [], [], []
        for delta in report.deltas:
            number = self._place(delta)
            if number is None:
                other_deltas.append(delta)
            else:
                order[number].next_index += 1
                places.append(number)
                tokens.append(delta.token_ids[0])
        pb = report_to_pb(replace(report, deltas=other_deltas) if tokens else report)
        pb.next_token_ids.extend(tokens)
        have_all_a_token = places == list(range(len(order)))
        if not have_all_a_token:
            pb.next_places.extend(places)
        new = _still_running(other_deltas)
        if new or (places and not have_all_a_token):
            self._order = [*(order[number] for number in places), *new]
            self._places = {
                (running.attempt, running.sequence_index): number for number, running in enumerate(self._order)
            }
        return pb

    def _place(self, delta: RequestDelta) -> int | None:
        """The index of the delta's sequence in `_order` if it brings exactly the next token; None otherwise."""
        has_more = delta.outcome is not None or delta.timings is not None or delta.logprobs or delta.prompt_logprobs
        if has_more or delta.draft_counts is not None or len(delta.token_ids) != 1:
            return None
        place = self._places.get((delta.attempt, delta.sequence_index))
        return place if place is not None and self._order[place].next_index == delta.first_index else None


class ReportReader:
    """The router's end: decodes reports."""

    def __init__(self) -> None:
        self._order: Sequence[_RunningSequence] = ()
        """The running sequences, in the order that both ends know."""

    def read(self, pb: node.StepReport) -> StepReport:
        """Decode the next report of the stream. Raises NodeLost if it does not fit the earlier ones."""
        report = report_from_pb(pb)
        continued = self._continued(pb)
        new = _still_running(report.deltas)
        if continued:
            report = replace(report, deltas=[*_next_deltas(continued, pb.next_token_ids), *report.deltas])
        if new:
            self._order = [*continued, *new]
        elif continued:
            self._order = continued
        return report

    def _continued(self, pb: node.StepReport) -> Sequence[_RunningSequence]:
        """The sequences to which the report's next tokens belong."""
        if not pb.next_token_ids:
            return ()
        try:
            continued = [self._order[number] for number in pb.next_places] if pb.next_places else self._order
        except IndexError:
            continued = ()
        if len(continued) != len(pb.next_token_ids):
            raise NodeLost("the node sent tokens that belong to no known sequence")
        return continued


def _next_deltas(continued: Sequence[_RunningSequence], token_ids: Sequence[int]) -> list[RequestDelta]:
    deltas = []
    for running, token in zip(continued, token_ids, strict=True):
        index = running.next_index
        running.next_index = index + 1
        deltas.append(RequestDelta(running.attempt, index, (token,), sequence_index=running.sequence_index))
    return deltas


def _still_running(deltas: Sequence[RequestDelta]) -> list[_RunningSequence]:
    return [_RunningSequence(delta) for delta in deltas if delta.token_ids and delta.outcome is None]
