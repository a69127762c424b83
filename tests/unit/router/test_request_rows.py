"""The list of requests that operators see, from the queue to the end of a request."""

from __future__ import annotations

from dataclasses import replace

from baton.cli.commands.describe import request_lines
from baton.messages.node import Leg, Outcome, StageTimings
from baton.messages.operator import RequestRow
from baton.wire.codec.operator import REQUEST_ROW
from router.operations.operator_handler import ended_rows, running_rows
from tests.support.router_parts import decode, prefill
from tests.support.router_rig import RouterRig, router_rig


def rows(rig: RouterRig) -> list[RequestRow]:
    now = rig.timers.monotonic()
    requests = rig.dispatcher.requests
    return [*running_rows(requests.active_requests(), "r0", now), *ended_rows(requests.timelines.latest(), "r0", now)]


async def test_the_row_of_a_request_follows_its_states() -> None:
    async with router_rig(prefill("p1"), decode("d1")) as rig:
        reader = rig.ask(request_id="a", max_tokens=3)
        first, second = await rig.next_submit("p1"), await rig.next_submit("d1")
        assert (first.leg, second.leg) == (Leg.PREFILL, Leg.DECODE)
        (row,) = rows(rig)
        assert (row.state, row.prefill_node, row.decode_node) == ("Prefilling", "p1", "d1")
        assert (row.prompt_tokens, row.output_tokens, row.ttft_ms, row.total_ms) == (5, 0, None, None)
        rig.timers.advance(2.0)
        rig.report("p1", first.attempt, 0, "x", Outcome.HANDED_OFF)
        await reader.wait_for_tokens(1)
        (row,) = rows(rig)
        assert (row.state, row.age_s, row.ttft_ms, row.output_tokens) == ("Transferring", 2.0, 2000.0, 1)
        rig.report("d1", second.attempt, 1, "y")
        await reader.wait_for_tokens(2)
        assert [(row.state, row.output_tokens) for row in rows(rig)] == [("Decoding", 2)]
        rig.timers.advance(1.0)
        rig.report("d1", second.attempt, 2, "z", Outcome.LENGTH, StageTimings(kv_bytes=77))
        await reader.finished()
        (row,) = rows(rig)
        assert (row.state, row.detail, row.total_ms, row.kv_bytes) == ("Finished", "length", 3000.0, 77)
        assert REQUEST_ROW.from_pb(REQUEST_ROW.to_pb(row)) == row


async def test_waiting_requests_have_no_node_and_the_latest_comes_first() -> None:
    async with router_rig() as rig:
        readers = [await rig.accepted(request_id=name) for name in "ab"]
        found = rows(rig)
        assert [(row.request_id, row.state, row.decode_node) for row in found] == [
            ("b", "Waiting", ""),
            ("a", "Waiting", ""),
        ]
        for name in "ab":
            rig.dispatcher.cancel(name)
        for reader in readers:
            await reader.raises(Exception, "cancelled")
        assert [row.state for row in rows(rig)] == ["Cancelled", "Cancelled"]


ROW = RequestRow("a", "Decoding", "r0", 1.25, "p0", "d0", 5, 2, 1, 31.0, None)


def test_the_details_of_a_request_as_text() -> None:
    assert request_lines(ROW) == [
        "Request:        a",
        "State:          Decoding",
        "Arrived:        1.2s ago, to r0",
        "Prefill node:   p0",
        "Decode node:    d0",
        "Attempts:       1",
        "Tokens:         5 of the prompt, 2 generated",
        "First token:    after 31ms",
        "",
        "Why it was placed there: baton explain a",
    ]
    over = request_lines(
        replace(ROW, state="Failed", detail="no node is up", ttft_ms=None, total_ms=12_000.0), " --run-dir d"
    )
    assert "State:          Failed (no node is up)" in over
    assert over[-4:] == [
        "KV moved:       none",
        "",
        "Where its time was spent: baton trace a --run-dir d",
        "Why it was placed there: baton explain a --run-dir d",
    ]
