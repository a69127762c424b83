"""The dispatcher over scripted nodes: both legs, failover, early ends, slow readers, and nothing left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from baton.errors import (
    AttemptsExhausted,
    Cancelled,
    DeadlineExceeded,
    Draining,
    DuplicateRequest,
    EngineFault,
    InvalidRequest,
    NoCapacity,
    RequestNotFound,
    SlowReader,
    Unreachable,
)
from baton.messages.generation import Chunk, Finished, GenerateEvent, GenerateRequest
from baton.messages.ids import AttemptKey
from baton.messages.node import Adopt, Leg, LoadReport, Outcome, RequestDelta, StageTimings
from router.admission.limits import DispatchLimits
from router.flight.flight_table import AttemptCause
from router.node_links import MAX_BROKEN
from tests.support.router_parts import decode, prefill
from tests.support.router_rig import Reader, RouterRig, router_rig


async def start_pair(rig: RouterRig, **fields: object) -> tuple[Reader, AttemptKey]:
    reader = rig.ask(**fields)  # type: ignore[arg-type]
    to_prefill, to_decode = await rig.next_submit("p1"), await rig.next_submit("d1")
    assert (to_prefill.leg, to_decode.leg) == (Leg.PREFILL, Leg.DECODE)
    assert to_decode.kv_source == rig.nodes["p1"].description.as_peer
    assert to_prefill.attempt == to_decode.attempt
    return reader, to_prefill.attempt


async def test_a_request_is_served_by_a_pair_of_nodes() -> None:
    async with router_rig(prefill(), decode()) as rig:
        reader, attempt = await start_pair(rig, seed=5, max_tokens=4)
        rig.timers.advance(0.25)
        rig.report("p1", attempt, 0, "w", Outcome.HANDED_OFF, StageTimings(1, 2, 0, cached_tokens=3))
        await reader.wait_for_tokens(1)
        rig.timers.advance(0.5)
        rig.report("d1", attempt, 1, "or")
        rig.report("d1", attempt, 3, "d", Outcome.LENGTH, StageTimings(transfer_ms=4, kv_bytes=99, queue_ms=50))
        finished = await reader.finished()
        assert reader.text == "word"
        assert [chunk.first_index for chunk in reader.chunks] == [0, 1]
        assert (reader.accepted.seed, reader.accepted.prompt_tokens) == (5, 5)
        assert (finished.finish_reason, finished.stop_reason, finished.completion_tokens) == ("length", None, 4)
        assert (finished.queue_ms, finished.prefill_ms, finished.transfer_ms) == (1, 2, 4)
        assert (finished.cached_tokens, finished.kv_bytes) == (3, 99)
        assert (finished.ttft_ms, finished.total_ms) == (pytest.approx(250), pytest.approx(750))
        assert (finished.path.prefill_node, finished.path.decode_node, finished.path.attempts) == ("p1", "d1", 1)


async def test_the_tokens_of_both_legs_may_arrive_in_any_order() -> None:
    async with router_rig(prefill(), decode()) as rig:
        reader, attempt = await start_pair(rig, max_tokens=3)
        rig.report("d1", attempt, 1, "bc", Outcome.LENGTH)
        await rig.nodes["d1"].all_read()
        assert reader.chunks == []
        rig.report("p1", attempt, 0, "a", Outcome.HANDED_OFF)
        await reader.finished()
        assert reader.text == "abc"


@pytest.mark.parametrize(
    ("fields", "said", "outcome", "text", "end"),
    [
        ({"stop": ("END",)}, ["a", "bE", "NDxyz"], None, "ab", ("stop", "END", 5)),
        (
            {"stop": ("END",), "include_stop_str_in_output": True},
            ["a", "bE", "NDxyz"],
            None,
            "abEND",
            ("stop", "END", 5),
        ),
        # The stop string takes precedence over the length in the same step.
        ({"stop": ("b",), "max_tokens": 3}, ["a", "bc"], Outcome.LENGTH, "a", ("stop", "b", 2)),
        # Text that was held back for it comes at the end.
        ({"stop": ("END",), "max_tokens": 3}, ["a", "EN"], Outcome.LENGTH, "aEN", ("length", None, 3)),
        ({"stop": ("b",), "min_tokens": 3}, ["b", "bbab"], None, "bbba", ("stop", "b", 5)),
    ],
)
async def test_a_stop_string_ends_the_text_and_aborts_the_leg(
    fields: dict[str, Any], said: Sequence[str], outcome: Outcome | None, text: str, end: tuple[str, str | None, int]
) -> None:
    """`said`: what the prefill node reports, and then the decode node, the last time with this outcome."""
    async with router_rig(prefill(), decode()) as rig:
        reader, attempt = await start_pair(rig, **{"max_tokens": 12, **fields})
        rig.report("p1", attempt, 0, said[0], Outcome.HANDED_OFF)
        for place, part in enumerate(said[1:], 1):
            at = sum(map(len, said[:place]))
            rig.report("d1", attempt, at, part, outcome if place == len(said) - 1 else None)
        finished = await reader.finished()
        assert (reader.text, len(reader.token_ids)) == (text, end[2])
        assert (finished.finish_reason, finished.stop_reason, finished.completion_tokens) == end
        if outcome is None:
            assert (await rig.next_abort("d1")).attempt == attempt


async def test_a_stop_token_is_returned_without_its_text() -> None:
    async with router_rig(prefill(), decode()) as rig:
        reader, attempt = await start_pair(rig)
        rig.report("p1", attempt, 0, "a", Outcome.HANDED_OFF)
        rig.report("d1", attempt, 1, "b!", Outcome.STOP, stop_token_id=ord("!"))
        finished = await reader.finished()
        assert (reader.text, reader.token_ids) == ("ab", [97, 98, 33])
        assert (finished.finish_reason, finished.stop_reason) == ("stop", 33)


async def test_a_request_is_retried_when_its_prefill_node_dies_before_the_first_token() -> None:
    async with router_rig(prefill("p1"), decode("d1"), prefill("p2")) as rig:
        reader, first = await start_pair(rig, max_tokens=2)
        rig.nodes["p1"].die()
        assert (await rig.next_abort("d1")).attempt == first
        second = (await rig.next_submit("p2")).attempt
        assert second == first._replace(attempt=2)
        assert (await rig.next_submit("d1")).kv_source == rig.nodes["p2"].description.as_peer
        # What the decode node still tells of the first attempt changes nothing.
        rig.report("d1", first, 1, "?", Outcome.KV_LOST)
        path = (await rig.finish(reader, second, "ab", prefill="p2")).path
        assert (reader.text, path.attempts, path.prefill_node) == ("ab", 2, "p2")


async def test_a_reused_request_id_starts_another_flight() -> None:
    async with router_rig(prefill("p1"), decode("d1")) as rig:
        reader, first = await start_pair(rig, request_id="mine", max_tokens=2)
        reader.task.cancel()
        assert {(await rig.next_abort(name)).attempt for name in ("p1", "d1")} == {first}
        reader, second = await start_pair(rig, request_id="mine", max_tokens=2)
        assert (second.request_id, second.attempt) == ("mine", 1)
        assert second != first
        rig.report("p1", first, 0, "?", Outcome.HANDED_OFF)
        rig.report("d1", first, 1, "?", Outcome.LENGTH)
        await rig.finish(reader, second, "ab")
        assert reader.text == "ab"


async def test_a_stream_continues_on_another_pair_when_its_decode_node_dies() -> None:
    async with router_rig(prefill("p1"), decode("d1"), decode("d2")) as rig:
        reader, first = await rig.streaming("abc", max_tokens=5)
        rig.nodes["d1"].die()
        assert (await rig.next_abort("p1")).attempt == first
        second = await rig.next_attempt("p1", "d2")
        finished = await rig.finish(reader, second, "abcde", decode="d2")
        assert (reader.text, finished.path.attempts) == ("abcde", 2)
        assert [chunk.first_index for chunk in reader.chunks] == [0, 3]


async def test_the_decode_node_does_everything_when_the_last_prefill_node_dies() -> None:
    async with router_rig(prefill(), decode()) as rig:
        reader, first = await start_pair(rig, max_tokens=2)
        rig.nodes["p1"].die()
        assert (await rig.next_abort("d1")).attempt == first
        whole = await rig.next_submit("d1")
        assert (whole.leg, whole.kv_source, whole.attempt) == (Leg.WHOLE, None, first._replace(attempt=2))
        # What it still tells of the first attempt changes nothing.
        rig.report("d1", first, 1, "?", Outcome.KV_LOST)
        path = (await rig.end(reader, "d1", whole.attempt, 0, "ab")).path
        assert (reader.text, path.attempts) == ("ab", 2)
        assert (path.prefill_node, path.decode_node, path.reason) == ("", "d1", "no prefill node is left")


async def test_a_request_fails_after_three_lost_attempts() -> None:
    async with router_rig(decode("d1"), decode("d2"), decode("d3"), decode("d4")) as rig:
        reader = rig.ask()
        for name in ("d1", "d2", "d3"):
            rig.report(name, await rig.next_attempt(name), 0, "")
            await rig.nodes[name].all_read()
            rig.nodes[name].die()
        await reader.raises(AttemptsExhausted, "3 attempts failed; the last: node d3 is gone")


async def test_a_silent_node_is_treated_as_lost() -> None:
    async with router_rig(prefill(), decode("d1"), decode("d2")) as rig:
        reader, first = await start_pair(rig, max_tokens=1)
        rig.nodes["d1"].is_silent = True
        rig.timers.advance(2.9)
        await rig.tell_all("p1", "d2")
        rig.timers.advance(0.2)
        assert (await rig.next_abort("p1")).attempt == first
        again = await rig.next_attempt("p1", "d2")
        lost = next(node for node in rig.view.statuses(0, 0) if node.name == "d1")
        assert (lost.status, lost.detail) == ("Suspect", "node d1 sent nothing for 3 s")
        await rig.end(reader, "p1", again, 0, "a")
        assert reader.text == "a"


async def test_a_router_that_was_suspended_does_not_take_its_nodes_for_silent() -> None:
    async with router_rig(prefill(), decode()) as rig:
        reader, attempt = await start_pair(rig, max_tokens=1)
        rig.timers.advance(60)
        for _ in range(5):
            await rig.tell_all("d1")
        await rig.end(reader, "p1", attempt, 0, "a")
        assert rig.nodes["p1"].num_attachments == 1


@pytest.mark.parametrize("stage", ["placing", "prefilling", "handed off", "streaming"])
@pytest.mark.parametrize("how", ["rpc", "client gone", "deadline"])
async def test_an_early_end_in_each_stage_reaches_both_nodes(stage: str, how: str) -> None:
    nodes = () if stage == "placing" else (prefill(), decode())
    async with router_rig(*nodes) as rig:
        reader = await rig.accepted(request_id="mine", timeout_s=1.0 if how == "deadline" else None)
        if nodes:
            attempt = await rig.next_attempt("p1", "d1")
        for name, index, told_in in (("p1", 0, ("handed off", "streaming")), ("d1", 1, ("streaming",))):
            if stage in told_in:
                rig.report(name, attempt, index, "a", Outcome.HANDED_OFF if name == "p1" else None)
                await reader.wait_for_tokens(index + 1)
        if how == "rpc":
            rig.dispatcher.cancel("mine")
        elif how == "deadline":
            rig.timers.advance(1.0)
        else:
            reader.task.cancel()
        if nodes:
            assert await rig.next_aborts("p1", "d1") == attempt
        ends = {"rpc": Cancelled, "client gone": asyncio.CancelledError, "deadline": DeadlineExceeded}
        await reader.raises(ends[how])


@pytest.mark.parametrize(
    ("fields", "kind", "why"),
    [
        ({"outcome": Outcome.ERROR, "error": "logits are not finite"}, EngineFault, "logits are not finite"),
        # No character has this code.
        ({"token_ids": (-1,)}, Exception, "the router failed while it handled this request"),
    ],
)
async def test_two_requests_at_once_of_which_one_fails(fields: dict[str, Any], kind: type[Exception], why: str) -> None:
    async with router_rig(prefill(), decode()) as rig:
        good, first = await start_pair(rig, max_tokens=2)
        bad, second = await start_pair(rig, max_tokens=2)
        rig.nodes["p1"].report(
            RequestDelta(second, **fields), RequestDelta(first, 0, (97,), outcome=Outcome.HANDED_OFF)
        )
        await bad.raises(kind, why)
        assert await rig.next_aborts("d1") == second
        await rig.end(good, "d1", first, 1, "b")
        assert good.text == "ab"


@pytest.mark.parametrize("clients_field", ["", "tool_choice"])
@pytest.mark.parametrize("text", ["", "ab"])
async def test_a_request_that_a_node_finds_invalid_fails_without_blaming_the_node(
    text: str, clients_field: str
) -> None:
    why = "is too complex: 2001 items"
    async with router_rig(prefill(), decode()) as rig:
        for _ in range(5):
            reader, attempt = await start_pair(rig, max_tokens=9, constraint_field=clients_field)
            if text:
                rig.report("p1", attempt, 0, text[0], Outcome.HANDED_OFF)
                rig.report("d1", attempt, 1, text[1:])
                await reader.wait_for_tokens(2)
            rig.nodes["d1"].report(RequestDelta(attempt, outcome=Outcome.INVALID, error=why, error_field="json_schema"))
            error = await reader.raises(InvalidRequest)
            assert (error.field, error.reason) == (clients_field or "json_schema", why)
            assert (await rig.next_abort("p1")).attempt == attempt
        assert rig.requests.counters.rejections["InvalidRequest"] == (0 if text else 5)
        assert not rig.requests.placer.open_breakers(0.0)


async def test_a_slow_reader_delays_no_other_and_is_ended_at_last() -> None:
    limits = DispatchLimits(max_backlog_tokens=3, stall_s=2.0)
    async with router_rig(prefill(), decode(), limits=limits) as rig:
        slow = rig.dispatcher.generate(GenerateRequest("hello", max_tokens=20))
        await anext(slow)
        attempt = await rig.next_attempt("p1", "d1")
        quick, other = await start_pair(rig, max_tokens=1)
        rig.report("p1", attempt, 0, "a", Outcome.HANDED_OFF)
        rig.report("d1", attempt, 1, "bcd")
        await rig.end(quick, "p1", other, 0, "z")
        await rig.next_aborts("d1", "p1")
        await rig.nodes["d1"].all_read()
        # Reading in time is forgiven, ...
        assert chunk_of(await anext(slow)) == (0, "abcd")
        rig.timers.advance(2.0)
        rig.report("d1", attempt, 4, "ef")
        rig.report("d1", attempt, 6, "gh")
        await rig.nodes["d1"].all_read()
        # ... not reading is not.
        rig.timers.advance(2.0)
        assert await rig.next_aborts("p1", "d1") == attempt
        # What had come is still delivered; then the end.
        assert chunk_of(await anext(slow)) == (4, "efgh")
        with pytest.raises(SlowReader, match="unread"):
            await anext(slow)


def chunk_of(event: GenerateEvent) -> tuple[int, str]:
    assert isinstance(event, Chunk)
    return event.first_index, event.text


async def test_chunks_taken_at_once_are_no_backlog_and_a_reader_may_catch_up() -> None:
    limits = DispatchLimits(max_backlog_tokens=2, stall_s=3.0)
    async with router_rig(decode("d1"), limits=limits) as rig:
        taken: list[Chunk] = []
        has_room = False

        def take(one: Chunk) -> bool:
            if has_room:
                taken.append(one)
            return has_room

        events = rig.dispatcher.generate(GenerateRequest("hello", max_tokens=12), take=take)
        await anext(events)
        attempt = await rig.next_attempt("d1")
        rig.report("d1", attempt, 0, "abcd")
        await rig.nodes["d1"].all_read()
        # Four wait for a reader that does something else. Then it comes back, and takes what follows at once.
        rest = await anext(events)
        assert isinstance(rest, Chunk)
        waiting = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        has_room = True
        rig.report("d1", attempt, 4, "efg")
        await rig.nodes["d1"].all_read()
        assert [one.text for one in taken] == ["efg"]
        rig.timers.advance(10.0)
        assert not waiting.done()
        rig.report("d1", attempt, 7, "hijkl", Outcome.LENGTH)
        assert isinstance(await waiting, Finished)
        assert "".join(one.text for one in taken) == "efghijkl"
        with pytest.raises(StopAsyncIteration):
            await anext(events)


async def test_a_request_that_lost_its_nodes_waits_for_a_model_to_load() -> None:
    async with router_rig(decode("d1")) as rig:
        reader = rig.ask(max_tokens=1)
        await rig.next_submit("d1")
        rig.nodes["d1"].die()
        await rig.wait_until_attached(0)
        for _ in range(20):
            # The node's address refuses the router, which tells its flights.
            await asyncio.sleep(0)
        rig.timers.advance(100)
        assert rig.requests.num_waiting == 1
        rig.timers.advance(30)
        await reader.raises(NoCapacity, "no node that serves demo is up")


async def test_a_stream_whose_link_was_cut_continues_on_its_nodes() -> None:
    async with router_rig(prefill(), decode()) as rig:
        reader, attempt = await rig.streaming("wx", max_tokens=4)
        rig.nodes["d1"].cut()
        assert await rig.nodes["d1"].inbox.get() == Adopt(attempt, 1, (2,))
        assert rig.nodes["d1"].kept == [attempt]
        rig.report("d1", attempt)
        assert (await rig.end(reader, "d1", attempt, 2, "yz")).path.attempts == 1
        assert reader.text == "wxyz"
        counters = rig.requests.counters
        assert (counters.attempts, counters.links_back) == ({AttemptCause.FIRST: 1}, 1)


async def test_a_stream_survives_repeated_cuts_of_its_link_up_to_a_limit() -> None:
    async with router_rig(decode()) as rig:
        reader = rig.ask(max_tokens=4)
        attempt = await rig.next_attempt("d1")

        async def until_told() -> None:
            while rig.nodes["d1"].inbox.empty():
                await asyncio.sleep(0)
                rig.timers.advance(0.1)

        for _ in range(MAX_BROKEN):
            rig.nodes["d1"].cut()
            await until_told()
            assert await rig.next_adopt("d1") == attempt
        rig.nodes["d1"].cut()
        await until_told()
        again = await rig.next_submit("d1")
        assert again.attempt.attempt == 2
        assert (await rig.end(reader, "d1", again.attempt, 0, "wxyz")).path.attempts == 2


async def test_a_request_cancelled_while_its_link_is_cut_is_aborted_when_it_is_back() -> None:
    async with router_rig(decode()) as rig:
        node = rig.nodes["d1"]
        reader, stays = rig.ask(max_tokens=9, request_id="leaves"), rig.ask(max_tokens=1, request_id="stays")
        left, kept = [await rig.next_attempt("d1") for _ in range(2)]
        rig.report("d1", left, 0, "w")
        await reader.wait_for_tokens(1)
        node.attach_error = Unreachable("no route to host")
        node.cut()
        await rig.wait_until_attached(0)
        await rig.cancel(reader)
        assert node.inbox.empty()
        await rig.timers.is_due(within=0.5)
        node.attach_error = None
        rig.timers.advance(0.5)
        assert (await rig.next_abort("d1")).attempt == left
        assert node.kept == [kept]
        assert await rig.next_adopt("d1") == kept
        await rig.end(stays, "d1", kept, 0, "x")


async def test_a_prompt_is_placed_again_when_a_node_of_an_older_version_can_not_keep_it() -> None:
    """Such a node aborts the attempts of an earlier stream, whatever the router keeps."""
    async with router_rig(decode()) as rig:
        reader = rig.ask(max_tokens=3)
        attempt = await rig.next_attempt("d1")
        rig.report("d1", attempt, 0, "w")
        await reader.wait_for_tokens(1)
        rig.nodes["d1"].cut()
        assert await rig.next_adopt("d1") == attempt
        rig.report("d1", attempt, outcome=Outcome.UNKNOWN)
        again = await rig.next_submit("d1")
        assert list(again.output_token_ids) == [ord("w")]
        assert (await rig.end(reader, "d1", again.attempt, 1, "xy")).path.attempts == 2
        assert rig.requests.counters.attempts[AttemptCause.NOT_KEPT] == 1


async def test_a_draining_node_gets_no_new_requests_and_refusals_count_as_no_attempt() -> None:
    async with router_rig(prefill(), decode("d1"), decode("d2")) as rig:
        reader, first = await start_pair(rig, max_tokens=2)
        rig.report("d1", first, outcome=Outcome.REFUSED)
        rig.nodes["d1"].report(load=LoadReport(draining=True))
        await rig.next_abort("p1")
        second = await rig.next_attempt("p1", "d2")
        await rig.nodes["d1"].all_read()
        assert [c.node.node_id for c in rig.view.candidates()] == ["d2", "p1"]
        await rig.finish(reader, second, "ab", decode="d2")


async def test_duplicates_bad_requests_and_a_draining_router_are_refused() -> None:
    async with router_rig(prefill(), decode()) as rig:
        reader, attempt = await start_pair(rig, request_id="mine", max_tokens=1)
        await rig.ask(request_id="mine").raises(DuplicateRequest)
        await rig.ask(prompt="").raises(InvalidRequest, "prompt: is empty")
        await rig.ask(timeout_s=0.0).raises(DeadlineExceeded)
        with pytest.raises(RequestNotFound):
            rig.dispatcher.cancel("nobody")
        rig.dispatcher.drain()
        await rig.ask().raises(Draining)
        assert rig.requests.num_live == 1
        await rig.end(reader, "p1", attempt, 0, "a")
        await rig.dispatcher.idle()
        assert rig.requests.counters.accepted == 1


async def test_a_long_text_is_tokenized_in_a_thread_with_the_same_result() -> None:
    async with router_rig(prefill(), decode(), limits=DispatchLimits(thread_text_chars=2)) as rig:
        reader, attempt = await start_pair(rig, max_tokens=1)
        assert (await rig.end(reader, "p1", attempt, 0, "a")).prompt_tokens == 5
