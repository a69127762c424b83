"""Reports without the fields that both ends know: a router reads exactly what the node wrote."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import NodeLost
from baton.messages.ids import AttemptKey
from baton.messages.node import LoadReport, Outcome, RequestDelta, StageTimings, StepReport
from baton.messages.sampling import TokenLogprobs
from baton.messages.speculation import DraftCounts
from baton.v1 import node_pb2
from baton.wire.codec.report_stream import ReportReader, ReportWriter

_KEYS = [AttemptKey(name, attempt, 2**63) for name in ("a", "b", "c") for attempt in (1, 2)]


def _delta(key: AttemptKey, index: int, *tokens: int, sequence: int = 0) -> RequestDelta:
    return RequestDelta(key, index, list(tokens), [], sequence_index=sequence)


def _report(*deltas: RequestDelta) -> StepReport:
    return StepReport(deltas, LoadReport(running=3))


def _in_order(deltas: Sequence[RequestDelta]) -> list[RequestDelta]:
    """Return deltas grouped by sequence. Order matters only within a sequence: index by index, the end last."""
    plain = [
        RequestDelta(
            delta.attempt,
            delta.first_index,
            list(delta.token_ids),
            list(delta.logprobs),
            delta.outcome,
            delta.stop_token_id,
            delta.error,
            delta.timings,
            delta.sequence_index,
            prompt_logprobs=list(delta.prompt_logprobs) or (),
            draft_counts=delta.draft_counts,
            prompt_timings=delta.prompt_timings,
        )
        for delta in deltas
    ]
    return sorted(
        plain, key=lambda delta: (delta.attempt, delta.sequence_index, delta.first_index, len(delta.token_ids))
    )


def _sent(writer: ReportWriter, report: StepReport) -> node_pb2.StepReport:
    return node_pb2.StepReport.FromString(writer.write(report).SerializeToString())


def test_a_continuing_sequence_sends_only_its_token() -> None:
    writer, reader = ReportWriter(), ReportReader()
    a, b, c = _KEYS[:3]
    first = _sent(writer, _report(_delta(a, 0, 5), _delta(b, 7, 6, 7)))
    assert (len(first.deltas), len(first.next_token_ids)) == (2, 0)
    assert _in_order(reader.read(first).deltas) == [_delta(a, 0, 5), _delta(b, 7, 6, 7)]

    both = _sent(writer, _report(_delta(a, 1, 8), _delta(b, 9, 9)))
    assert (list(both.next_token_ids), list(both.next_places), len(both.deltas)) == ([8, 9], [], 0)
    assert _in_order(reader.read(both).deltas) == [_delta(a, 1, 8), _delta(b, 9, 9)]

    one_and_a_new_one = _sent(writer, _report(_delta(b, 10, 1), _delta(c, 0, 2)))
    assert (list(one_and_a_new_one.next_places), len(one_and_a_new_one.deltas)) == ([1], 1)
    assert _in_order(reader.read(one_and_a_new_one).deltas) == [_delta(b, 10, 1), _delta(c, 0, 2)]

    back = _sent(writer, _report(_delta(a, 2, 3)))
    assert (len(back.deltas), len(back.next_token_ids)) == (1, 0)
    assert _in_order(reader.read(back).deltas) == [_delta(a, 2, 3)]


def test_a_sequence_that_paused_is_sent_in_full_again() -> None:
    writer, reader = ReportWriter(), ReportReader()
    a, b, c = _KEYS[:3]
    reader.read(_sent(writer, _report(_delta(a, 0, 1), _delta(b, 0, 1), _delta(c, 0, 1))))
    for index in (1, 2):
        two = _sent(writer, _report(_delta(b, index, 7), _delta(c, index, 8)))
        assert list(two.next_places) == ([1, 2] if index == 1 else [])
        assert _in_order(reader.read(two).deltas) == [_delta(b, index, 7), _delta(c, index, 8)]
    back = _sent(writer, _report(_delta(a, 1, 5), _delta(c, 3, 6)))
    assert (len(back.deltas), list(back.next_token_ids), list(back.next_places)) == (1, [6], [1])
    assert _in_order(reader.read(back).deltas) == [_delta(a, 1, 5), _delta(c, 3, 6)]


def test_reports_without_tokens_change_nothing_between_two_tokens() -> None:
    writer, reader, a = ReportWriter(), ReportReader(), _KEYS[0]
    for report in (_report(_delta(a, 0, 5)), _report(), _report(RequestDelta(_KEYS[1])), _report(_delta(a, 1, 6))):
        last = _sent(writer, report)
        read = reader.read(last)
    assert not last.deltas
    assert _in_order(read.deltas) == [_delta(a, 1, 6)]


@pytest.mark.parametrize(
    "pb",
    [
        node_pb2.StepReport(next_token_ids=[1]),
        node_pb2.StepReport(next_token_ids=[1], next_places=[4]),
        node_pb2.StepReport(next_token_ids=[1, 2], next_places=[0]),
    ],
)
def test_tokens_of_unknown_sequences_end_the_stream(pb: node_pb2.StepReport) -> None:
    with pytest.raises(NodeLost, match="belong to no known sequence"):
        ReportReader().read(pb)


_deltas = st.builds(
    lambda key, index, tokens, logprobs, end, timings, sequence, prompt_logprobs, counts: RequestDelta(
        *(key, index, tokens, logprobs, end[0], None, end[1], timings[0], sequence),
        prompt_logprobs=prompt_logprobs,
        draft_counts=counts,
        prompt_timings=timings[1],
    ),
    st.sampled_from(_KEYS),
    st.integers(0, 4),
    st.lists(st.integers(0, 9), max_size=2),
    st.sampled_from([[], [], [TokenLogprobs(1, -0.5, 1, [(1, -0.5)])]]),
    st.sampled_from([(None, ""), (None, ""), (Outcome.STOP, ""), (Outcome.KV_LOST, "why")]),
    st.sampled_from([(None, None), (StageTimings(1, 2, 3, 4, 5, 6), None), (StageTimings(1), StageTimings(2, 3))]),
    st.integers(0, 1),
    st.sampled_from([[], [], [TokenLogprobs(2, -1.5, 3, [(1, -0.5)])]]),
    st.sampled_from([None, None, DraftCounts(3, 2)]),
)


@given(st.lists(st.tuples(st.lists(_deltas, max_size=4), st.sets(st.integers(0, 11), max_size=3)), max_size=12))
def test_any_reports_are_read_as_they_were_written(steps: list[tuple[list[RequestDelta], set[int]]]) -> None:
    writer, reader = ReportWriter(), ReportReader()
    indices = [0] * 12
    for others, going in steps:
        deltas = list(others)
        for number in going:
            deltas.append(_delta(_KEYS[number // 2], indices[number], number, sequence=number % 2))
            indices[number] += 1
        # What is said twice of the same tokens comes in any order: sorting can't tell which is which.
        unique = {(one.attempt, one.sequence_index, one.first_index, len(one.token_ids)): one for one in deltas}
        report = _report(*unique.values())
        assert _in_order(reader.read(_sent(writer, report)).deltas) == _in_order(report.deltas)
