"""The stages of a request's time: they add up to the nanosecond, whatever happened to it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.messages.generation import GenerateRequest
from baton.messages.ids import new_request_id
from baton.messages.node import StageTimings
from baton.messages.operator import Timeline, TimelineStage
from baton.wire.codec.operator import TIMELINE
from router.flight.flight_attempt import AttemptTimings
from router.flight.timeline import EndedRequest, Moments, TimelineLog, timeline
from tests.support.simulated_cluster import SimulatedCluster, SimulatedLimits, simulated_cluster
from tests.support.virtual_time import run_virtually

NUM_REQUESTS = 200

PAIR = EndedRequest(
    request_id="r",
    moments=Moments(10.0, 10.001, 10.003, 10.003, 10.003, 10.05),
    ended_at=10.1,
    state="finished",
    detail="length",
    attempts=1,
    is_adopted=False,
    at_first_token=AttemptTimings("p", StageTimings(queue_ms=4.0, prefill_ms=40.0, cached_tokens=16), "d"),
    at_end=AttemptTimings(
        "p",
        StageTimings(queue_ms=4.0, prefill_ms=40.0, cached_tokens=16),
        "d",
        StageTimings(1.0, transfer_ms=9.0, kv_bytes=99, intake_ms=48.0, decode_ms=45.0),
        True,
    ),
    prompt_tokens=32,
    completion_tokens=8,
)


def check(found: Timeline) -> None:
    """Check the properties of every timeline."""
    assert all(stage.duration_ns > 0 for stage in found.stages)
    assert sum(stage.duration_ns for stage in found.stages) == found.total_ns
    before = [stage.duration_ns for stage in found.stages if not stage.after_first_token]
    assert sum(before) == (found.total_ns if found.ttft_ns is None else found.ttft_ns)
    assert [stage.after_first_token for stage in found.stages] == sorted(s.after_first_token for s in found.stages)


def stages(request: EndedRequest) -> list[tuple[str, str, float, bool]]:
    """Return names, places and milliseconds of the stages."""
    found = timeline(request, "router", 11.0)
    check(found)
    return [(s.name, s.where, s.duration_ns / 1e6, s.after_first_token) for s in found.stages]


def test_the_timeline_of_a_pair_has_every_stage() -> None:
    assert stages(PAIR) == [
        ("admit", "router", 1.0, False),
        ("queue", "router", 2.0, False),
        ("queue", "p", 4.0, False),
        ("prefill", "p", 40.0, False),
        ("relay", "router > p", 3.0, False),
        ("transfer", "d", 2.0, True),
        ("decode", "d", 45.0, True),
        ("relay", "d > router", 3.0, True),
    ]
    found = timeline(PAIR, "router", 11.0)
    assert (found.ttft_ns, found.total_ns, found.kv_read_ns) == (50_000_000, 100_000_000, 9_000_000)
    assert (found.prefill_node, found.decode_node, found.cached_tokens) == ("p", "d", 16)
    assert found.starts_ns[5] == found.ttft_ns
    assert TIMELINE.from_pb(TIMELINE.to_pb(found)) == found


def test_the_timeline_of_one_node_has_no_transfer() -> None:
    told = StageTimings(queue_ms=4.0, prefill_ms=40.0, decode_ms=1.0)
    alone = replace(
        PAIR,
        at_first_token=AttemptTimings("d", told),
        at_end=AttemptTimings("d", replace(told, decode_ms=46.0), is_complete=True),
    )
    assert [stage[:3] for stage in stages(alone)[5:]] == [("decode", "d", 45.0), ("relay", "d > router", 5.0)]
    found = timeline(alone, "router", 11.0)
    assert (found.prefill_node, found.decode_node) == ("", "d")


def test_without_final_timings_decoding_lasts_until_the_end() -> None:
    assert PAIR.at_end.decode is not None
    told = PAIR.at_end._replace(decode=replace(PAIR.at_end.decode, decode_ms=8.0), is_complete=False)
    assert [stage[:3] for stage in stages(replace(PAIR, at_end=told))[5:]] == [
        ("transfer", "d", 2.0),
        ("decode", "d", 48.0),
    ]


def test_overlapping_stages_are_cut() -> None:
    assert PAIR.at_end.decode is not None
    longer = PAIR.at_end._replace(decode=replace(PAIR.at_end.decode, intake_ms=53.0))
    assert [stage[:3] for stage in stages(replace(PAIR, at_end=longer))[5:]] == [
        ("transfer", "d", 7.0),
        ("decode", "d", 43.0),
    ]


def test_the_decode_node_may_report_the_first_token() -> None:
    """A beam search is such a case: its tokens come all at once."""
    quicker = replace(PAIR, moments=replace(PAIR.moments, first_token=10.1), at_first_token=PAIR.at_end)
    assert [stage[:3] for stage in stages(quicker)[2:]] == [
        ("queue", "p", 4.0),
        ("prefill", "p", 40.0),
        ("transfer", "d", 5.0),
        ("decode", "d", 45.0),
        ("relay", "router > p", 3.0),
    ]


def test_failed_attempts_are_lost_time() -> None:
    others = PAIR.at_end._replace(prompt=None, decode=StageTimings(1.0, intake_ms=2.0, decode_ms=45.0))
    again = replace(PAIR, moments=replace(PAIR.moments, placed_last=10.07), at_end=others, attempts=2)
    assert stages(again)[5:] == [
        ("lost", "router", 20.0, True),
        ("queue", "d", 1.0, True),
        ("transfer", "d", 2.0, True),
        ("decode", "d", 27.0, True),
    ]
    before = replace(PAIR, moments=replace(PAIR.moments, placed=10.002), attempts=2)
    assert [stage[:3] for stage in stages(before)[1:3]] == [("queue", "router", 1.0), ("lost", "router", 1.0)]


def test_a_stream_that_moved_was_decoded_before_and_stood_still_for_a_moment() -> None:
    there = StageTimings(1.0, intake_ms=30.0, decode_ms=20.0)
    ends = AttemptTimings("p", PAIR.at_end.prompt, "e", there, is_complete=True, moved_from="d")
    moved = replace(PAIR, moments=replace(PAIR.moments, placed_last=10.07), at_end=ends, attempts=2)
    assert [stage[:3] for stage in stages(moved)[5:]] == [
        ("decode", "d", 20.0),
        ("move", "d > e", 10.0),
        ("decode", "e", 20.0),
    ]
    goes_on = replace(moved, at_end=ends._replace(is_complete=False))
    assert [stage[:3] for stage in stages(goes_on)[6:]] == [("decode", "e", 30.0)]


def test_requests_that_ended_early_have_fewer_stages() -> None:
    nobody = replace(
        PAIR, moments=Moments(10.0, 10.001), at_first_token=AttemptTimings(), at_end=AttemptTimings(), state="failed"
    )
    assert stages(nobody) == [("admit", "router", 1.0, False), ("queue", "router", 99.0, False)]
    no_token = replace(PAIR, moments=replace(PAIR.moments, first_token=None, placed_last=10.02), state="cancelled")
    assert [stage[:3] for stage in stages(no_token)[2:]] == [
        ("lost", "router", 17.0),
        ("unfinished", "router > p", 80.0),
    ]
    adopted = replace(PAIR, is_adopted=True)
    assert [stage[:3] for stage in stages(adopted)[2:3]] == [("adopt", "router > d", 47.0)]
    nodes_gone = replace(
        PAIR, moments=replace(PAIR.moments, placed_last=10.07), at_end=AttemptTimings(), state="failed"
    )
    assert [stage[:3] for stage in stages(nodes_gone)[5:]] == [("lost", "router", 20.0), ("unfinished", "router", 30.0)]


milliseconds = st.floats(0.0, 1e6)
timings = st.none() | st.builds(
    StageTimings,
    queue_ms=milliseconds,
    prefill_ms=milliseconds,
    intake_ms=milliseconds,
    decode_ms=milliseconds,
)
measured = st.builds(
    AttemptTimings, st.sampled_from(["", "p"]), timings, st.sampled_from(["", "d"]), timings, st.booleans()
)


@given(st.lists(st.floats(0.0, 1e6), min_size=7, max_size=7).map(sorted), measured, measured, st.booleans())
def test_the_stages_add_up_whatever_nodes_report(
    moments: list[float], first: AttemptTimings, last: AttemptTimings, is_adopted: bool
) -> None:
    received, admitted, placed, for_first, first_token, placed_last, ended = moments
    request = replace(
        PAIR,
        moments=Moments(received, admitted, placed, placed_last, for_first, first_token),
        ended_at=ended,
        at_first_token=first,
        at_end=last,
        is_adopted=is_adopted,
    )
    check(timeline(request, "router", ended))
    same = replace(request.moments, placed_last=for_first)
    check(timeline(replace(request, moments=same), "router", ended))


def test_the_latest_timelines_are_kept() -> None:
    log = TimelineLog(kept=2)
    for name in ("a", "b", "a", "c"):
        log.add(replace(PAIR, request_id=name))
    assert [log.find(name) is not None for name in ("a", "b", "c")] == [True, False, True]


async def ask(cluster: SimulatedCluster, rng: Random) -> Timeline:
    request_id = new_request_id(rng)
    prompt = [rng.randrange(97) for _ in range(rng.randrange(1, 40))]
    fields: dict[str, Any] = rng.choice([{}, {}, {"n": 2}, {"beam_width": 2, "temperature": 0.0}])
    request = GenerateRequest(prompt, request_id, max_tokens=rng.randrange(1, 7), seed=1, **fields)
    answer = await cluster.generate(request)
    assert answer.finished is not None, answer.error
    ended = cluster.dispatcher.requests.timelines.find(request_id)
    assert ended is not None
    found = timeline(ended, "router-0", 0.0)
    assert found.ttft_ns == pytest.approx(answer.finished.ttft_ms * 1e6, abs=2)
    assert found.total_ns == pytest.approx(answer.finished.total_ms * 1e6, abs=2)
    return found


async def many() -> list[Timeline]:
    rng = Random(8)
    limits = SimulatedLimits(max_num_seqs=16, chunk=64, num_blocks=256, digests=False)
    found: list[Timeline] = []
    async with simulated_cluster(rng, prefill=2, decode=2, limits=limits) as cluster:
        while len(found) < NUM_REQUESTS:
            found += await asyncio.gather(*(ask(cluster, rng) for _ in range(50)))
    return found


def test_the_timelines_of_many_requests_add_up() -> None:
    found = run_virtually(many())
    assert len(found) == NUM_REQUESTS
    for one in found:
        check(one)
    names = {stage.name for one in found for stage in one.stages}
    assert names >= {"queue", "prefill", "transfer", "decode", "relay"}
    # The nodes' own figures account for nearly all of the time, the wire for the little that it takes here.
    relayed = sum(stage.duration_ns for one in found for stage in one.stages if stage.name == "relay")
    assert relayed < 0.15 * sum(one.total_ns for one in found)


def test_a_stage_without_measurements_is_left_out() -> None:
    found = timeline(
        replace(PAIR, at_first_token=AttemptTimings("p", None, "d"), at_end=AttemptTimings("p", None, "d")),
        "router",
        11.0,
    )
    assert [stage for stage in found.stages if stage.name == "relay"] == [
        TimelineStage("relay", "router > p", 47_000_000)
    ]
    check(found)
