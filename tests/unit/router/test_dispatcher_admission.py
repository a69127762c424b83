"""Admission by the dispatcher: which requests wait, which are refused, and that nothing of either is left."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Literal

import pytest

from baton.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    NoCapacity,
    Overloaded,
    QueueFull,
    WouldBeLate,
)
from baton.messages.ids import unscoped
from baton.messages.node import LoadReport, NodeDescription, Outcome
from baton.observe.metrics import render
from router.admission.exchange import ChargedTotal
from router.admission.limits import DispatchLimits
from router.operations.metrics import figures
from router.placement.placer import PlacementSettings, Placer, Policy
from tests.support.router_parts import decode, prefill
from tests.support.router_rig import Reader, RouterRig, all_leave, router_rig


def small(name: str = "d1", **changes: object) -> NodeDescription:
    """Return a node that runs two sequences and is full with one more."""
    return decode(name, max_num_seqs=2, max_num_batched_tokens=64, **changes)


async def start_requests(rig: RouterRig, name: str = "d1", count: int = 3) -> list[Reader]:
    return [await rig.accepted(request_id=f"{name}-{number}", max_tokens=1) for number in range(count)]


async def finish_requests(rig: RouterRig, *readers: Reader, name: str = "d1") -> None:
    """Let the node finish its requests in the order of their arrival."""
    for _ in readers:
        await rig.serve(name)
    for reader in readers:
        await reader.finished()


async def test_requests_beyond_a_nodes_capacity_wait_at_the_router_in_order() -> None:
    async with router_rig(small()) as rig:
        running = await start_requests(rig)
        late = await rig.accepted(request_id="late", max_tokens=1, priority=1)
        better = await rig.accepted(request_id="better", max_tokens=1)
        assert (rig.requests.num_waiting, rig.nodes["d1"].inbox.qsize()) == (2, 3)
        rig.timers.advance(0.5)
        await finish_requests(rig, *running)
        sent = [await rig.next_attempt("d1") for _ in range(2)]
        assert [attempt.request_id for attempt in sent] == ["better", "late"]
        for attempt in sent:
            rig.report("d1", attempt, 0, "a", Outcome.LENGTH)
        assert (await late.finished()).queue_ms == pytest.approx(500)
        await better.finished()
        queue_time = rig.requests.counters.queue_time
        assert (queue_time.count, queue_time.total) == (5, pytest.approx(1.0))
        page = render(figures(rig.dispatcher.requests, rig.view, 0.0, 0.0), {"node": "router-1"}).decode()
        assert 'baton_request_queue_time_seconds_bucket{le="0.001",node="router-1"} 3.0' in page
        assert 'baton_request_queue_time_seconds_bucket{le="+Inf",node="router-1"} 5.0' in page


async def test_a_full_node_is_skipped_while_another_has_room() -> None:
    async with router_rig(prefill(), small("d1"), small("d2")) as rig:
        await rig.tell_all("d1", waiting=2)
        readers = await start_requests(rig, count=3)
        assert (rig.nodes["d1"].inbox.qsize(), rig.nodes["d2"].inbox.qsize()) == (0, 3)
        assert rig.requests.num_waiting == 0
        for _ in readers:
            await rig.serve("p1")
        for reader in readers:
            await reader.finished()
        await rig.tell_all("d1")


async def test_queued_prompts_fill_a_prefill_node_and_its_report_admits_the_next_one() -> None:
    async with router_rig(prefill(max_num_seqs=64, max_num_batched_tokens=2), decode()) as rig:
        await rig.tell_all("p1", running=1, uncomputed_tokens=8)
        reader = await rig.accepted(max_tokens=1)
        assert rig.requests.num_waiting == 1
        rig.nodes["p1"].report(load=LoadReport(running=1, uncomputed_tokens=7))
        attempt = await rig.next_attempt("p1")
        await rig.end(reader, "p1", attempt, 0, "a")


async def test_a_request_that_fits_only_a_full_node_waits_for_it() -> None:
    async with router_rig(small("d1"), decode("d2", max_num_seqs=1, num_blocks=2)) as rig:
        await rig.tell_all("d1", waiting=2)
        reader = await rig.accepted(max_tokens=40)
        assert rig.requests.num_waiting == 1
        rig.nodes["d1"].report(load=LoadReport())
        rig.report("d1", await rig.next_attempt("d1"), 0, "a", Outcome.STOP, stop_token_id=97)
        await reader.finished()


async def test_the_number_of_running_requests_is_limited() -> None:
    async with router_rig(decode(), limits=DispatchLimits(max_running=1)) as rig:
        first, second = rig.ask(max_tokens=1, request_id="1"), rig.ask(max_tokens=1, request_id="2")
        await second.wait_until_accepted()
        assert (rig.requests.num_placed, rig.requests.num_waiting) == (1, 1)
        await finish_requests(rig, first)
        await finish_requests(rig, second)


@pytest.mark.parametrize(("fairness", "expected"), [("tokens", "a1 b0 a2 b1 a3"), ("off", "a1 a2 a3 b0 b1")])
async def test_waiting_tenants_take_turns_by_the_tokens_that_they_have_had(
    fairness: Literal["tokens", "off"], expected: str
) -> None:
    async with router_rig(small(), limits=DispatchLimits(fairness=fairness)) as rig:
        running = await start_requests(rig, count=2)
        names = ("a0", "a1", "a2", "a3", "b0", "b1")
        readers = [await rig.accepted(request_id=name, tenant=name[0], max_tokens=1) for name in names]
        await finish_requests(rig, *running)
        sent = []
        for _ in readers:
            attempt = await rig.next_attempt("d1")
            sent.append(attempt.request_id)
            rig.report("d1", attempt, 0, "x", Outcome.LENGTH)
        for reader in readers:
            await reader.finished()
        # The first one had a place at once, which nobody else wanted: it costs nothing.
        assert " ".join(name.removeprefix("a/").removeprefix("b/") for name in sent) == f"a0 {expected}"


@pytest.mark.parametrize("fairness", ["tokens", "off"])
async def test_a_tenant_with_nothing_on_nodes_goes_ahead_there_and_has_its_turn_at_once(
    fairness: Literal["tokens", "off"],
) -> None:
    async with router_rig(small(), limits=DispatchLimits(fairness=fairness)) as rig:
        earlier = [await rig.accepted(tenant=tenant, max_tokens=1) for tenant in ("light", "flood")]
        rig.timers.advance(2.0)
        await finish_requests(rig, *earlier)
        flood = [await rig.accepted(request_id=f"f{number}", tenant="flood", max_tokens=1) for number in range(6)]
        await finish_requests(rig, *flood[:2])
        light = [await rig.accepted(request_id=f"l{number}", tenant="light", max_tokens=1) for number in range(2)]
        count, sent = rig.nodes["d1"].inbox.qsize(), list[tuple[str, float | None]]()
        for _ in range(6):
            submit = await rig.next_submit("d1")
            sent.append((unscoped(submit.attempt.request_id), submit.turn))
            rig.report("d1", submit.attempt, 0, "x", Outcome.LENGTH)
        for reader in (*flood[2:], *light):
            await reader.finished()
        if fairness == "off":
            assert (count, sent) == (3, [(name, None) for name in ("f2", "f3", "f4", "f5", "l0", "l1")])
        else:
            assert (count, [name for name, _ in sent]) == (4, ["f2", "f3", "f4", "l0", "f5", "l1"])
            assert [turn for _, turn in sent[:4]] == [2.0, 2.0, 2.0, 0.0]


@pytest.mark.parametrize(
    ("flood_class", "own_class", "goes_ahead"),
    [
        ("normal", "normal", True),
        ("normal", "urgent", True),
        ("urgent", "normal", False),
        ("normal", "batch", False),
        ("batch", "batch", False),
    ],
)
async def test_by_its_class_a_request_goes_ahead_on_nodes(flood_class: str, own_class: str, goes_ahead: bool) -> None:
    async with router_rig(small()) as rig:
        flood = [await rig.accepted(tenant="flood", service_class=flood_class, max_tokens=1) for _ in range(3)]
        light = await rig.accepted(tenant="light", service_class=own_class, max_tokens=1)
        assert rig.nodes["d1"].inbox.qsize() == 3 + goes_ahead
        await all_leave(*flood, light)


@pytest.mark.parametrize("other", ["other", "own"])
async def test_a_tenant_ahead_of_one_at_another_router_leaves_it_the_headroom_of_nodes(other: str) -> None:
    def waits(tokens: float) -> Mapping[str, Sequence[ChargedTotal]]:
        return {"r2": [ChargedTotal("text-normal", other, 1, tokens, 1.0, waits=True)]}

    async with router_rig(small()) as rig:
        rig.requests.exchange.take_all(waits(0.0))
        readers = [await rig.accepted(tenant="own", max_tokens=1) for _ in range(7)]
        left = []
        for reader in readers[:4]:
            await rig.serve("d1")
            await reader.finished()
            left.append(rig.requests.num_waiting)
        # After two of its waiting requests it is ahead. From then on it gets seats that nobody else has taken.
        assert left == ([3, 2, 2, 1] if other == "other" else [3, 2, 1, 0])
        rig.requests.exchange.take_all(waits(1e6))
        await rig.tell_all("d1", running=2)
        assert rig.requests.num_waiting == 0, "the other one has had more"
        await all_leave(*readers[4:])


async def test_an_attempt_after_the_first_has_its_turn_at_once() -> None:
    async with router_rig(decode()) as rig:
        first = await rig.accepted(max_tokens=1)
        rig.timers.advance(2.0)
        await finish_requests(rig, first)
        readers = [await rig.accepted(request_id=name, max_tokens=1) for name in "ab"]
        await rig.next_submit("d1")
        refused = await rig.next_submit("d1")
        rig.report("d1", refused.attempt, outcome=Outcome.REFUSED)
        again = await rig.next_submit("d1")
        assert (refused.turn, again.turn, again.attempt.attempt) == (2.0, 0.0, 2)
        await all_leave(*readers)


async def test_a_full_queue_refuses_equal_priorities_and_displaces_the_lowest_for_higher_ones() -> None:
    async with router_rig(small(), limits=DispatchLimits(max_queue=2)) as rig:
        running = await start_requests(rig)
        waiting = [await rig.accepted(max_tokens=1, request_id=f"w{n}", priority=1) for n in range(2)]
        refused = rig.ask(request_id="no", priority=1)
        error = await refused.raises(QueueFull)
        assert 0.75 <= error.retry_after_s <= 1.25
        assert not refused.events, "who is turned away at once hears no Accepted"
        better = rig.ask(max_tokens=1, request_id="yes")
        shed = await waiting[1].raises(QueueFull)
        assert "another request has the place" in str(shed)
        assert rig.requests.num_waiting == 2
        assert rig.requests.counters.rejections == {"QueueFull": 2}
        page = render(figures(rig.dispatcher.requests, rig.view, 0.0, 0.0), {}).decode()
        assert 'baton_rejections_total{reason="queue_full"} 2.0' in page
        assert "baton_num_requests_waiting 2.0" in page
        await finish_requests(rig, *running)
        await finish_requests(rig, better, waiting[0])


async def test_a_request_that_would_be_late_is_refused_at_once() -> None:
    async with router_rig(small()) as rig:
        running = await start_requests(rig)
        attempts = [await rig.next_attempt("d1") for _ in running]
        rig.timers.advance(6.0)
        rig.report("d1", attempts[0], 0, "a", Outcome.LENGTH)
        await running[0].finished()
        running[0] = rig.ask(max_tokens=1, request_id="another")
        attempts[0] = await rig.next_attempt("d1")
        # 6 s each, three at once: the next one is placed after 2 s and has its first token after 6 s more.
        for fields in ({"timeout_s": 7.9}, {"ttft_slo_ms": 7900.0}):
            error = await rig.ask(request_id="late", **fields).raises(WouldBeLate)  # type: ignore[arg-type]
            assert error.retry_after_s >= 1.5
        in_time = await rig.accepted(request_id="in-time", max_tokens=1, timeout_s=8.1, ttft_slo_ms=8100.0)
        for attempt in attempts:
            rig.report("d1", attempt, 0, "a", Outcome.LENGTH)
        await finish_requests(rig, in_time)
        for reader in running:
            await reader.finished()


async def test_predicted_lateness_refuses_a_request_unless_a_node_is_idle() -> None:
    async with router_rig(decode(), placer=Placer(PlacementSettings(Policy.COST))) as rig:
        tried = rig.ask(request_id="tried", max_tokens=1, ttft_slo_ms=1e-3)
        await finish_requests(rig, tried)
        await rig.tell_all("d1", running=1, uncomputed_tokens=10**7)
        await rig.ask(ttft_slo_ms=1000.0).raises(WouldBeLate)
        await rig.ask(timeout_s=1.0).raises(WouldBeLate)
        await finish_requests(rig, rig.ask(max_tokens=1))


POLICIES = [Policy.COST, Policy.LEAST_LOADED, Policy.ROUND_ROBIN]


async def pace(rig: RouterRig, reader: Reader, seconds: float) -> None:
    """Let the node report two tokens with this gap between them, and the end."""
    attempt = await rig.next_attempt("d1")
    rig.report("d1", attempt, 0, "a")
    await rig.nodes["d1"].all_read()
    rig.timers.advance(seconds)
    await rig.end(reader, "d1", attempt, 1, "b")


@pytest.mark.parametrize("policy", POLICIES)
async def test_an_unattainable_token_rate_is_refused_by_every_policy(policy: Policy) -> None:
    async with router_rig(decode(), placer=Placer(PlacementSettings(policy))) as rig:
        # Nothing is known yet, and an idle node is worth a try.
        await pace(rig, rig.ask(request_id="tried", max_tokens=2, tpot_slo_ms=1e-3), 0.02)
        error = await rig.ask(max_tokens=2, tpot_slo_ms=1e-3).raises(WouldBeLate)
        assert "it allows 0.001 ms" in str(error)
        assert error.retry_after_s > 0.0
        assert rig.requests.counters.rejections == {"WouldBeLate": 1}
        # What it hopes for can be kept, or has no second token that could be late.
        await pace(rig, rig.ask(request_id="kept", max_tokens=2, tpot_slo_ms=25.0), 0.02)
        await finish_requests(rig, rig.ask(request_id="one", max_tokens=1, tpot_slo_ms=1e-3))
        # After a while nobody knows any more, and somebody has to try.
        rig.timers.advance(61.0)
        await pace(rig, rig.ask(request_id="again", max_tokens=2, tpot_slo_ms=1e-3), 0.02)


@pytest.mark.parametrize("policy", POLICIES)
async def test_a_first_token_that_comes_too_late_is_refused_by_every_policy(policy: Policy) -> None:
    async with router_rig(decode(), placer=Placer(PlacementSettings(policy))) as rig:
        first = rig.ask(request_id="first", max_tokens=1)
        attempt = await rig.next_attempt("d1")
        rig.timers.advance(2.0)
        await rig.end(first, "d1", attempt, 0, "a")
        running = await rig.accepted(request_id="running", max_tokens=1)
        await rig.tell_all("d1", running=1, uncomputed_tokens=10**7)
        await rig.ask(ttft_slo_ms=1500.0, max_tokens=1).raises(WouldBeLate)
        await finish_requests(rig, running)


@pytest.mark.parametrize("how", ["cancel", "client gone", "deadline", "slo"])
async def test_a_client_that_leaves_the_queue_leaves_nothing_behind(how: str) -> None:
    async with router_rig(small()) as rig:
        running = await start_requests(rig)
        timers = rig.timers.num_pending
        reader = rig.ask(
            request_id="mine",
            timeout_s=1.0 if how == "deadline" else None,
            ttft_slo_ms=1000.0 if how == "slo" else None,
        )
        behind = rig.ask(request_id="behind", max_tokens=1)
        await reader.wait_until_accepted()
        await behind.wait_until_accepted()
        assert rig.requests.num_waiting == 2
        if how == "cancel":
            rig.dispatcher.cancel("mine")
        elif how == "client gone":
            reader.task.cancel()
        else:
            rig.timers.advance(1.0)
        assert rig.requests.num_waiting == (2 if how == "client gone" else 1)
        expected = {"cancel": Cancelled, "client gone": asyncio.CancelledError, "deadline": DeadlineExceeded}
        with pytest.raises(expected.get(how, Overloaded)):
            await reader.finished()
        assert (rig.requests.num_waiting, rig.requests.num_live) == (1, 4)
        assert rig.timers.num_pending == timers + 1, "only the patience of the one behind is left"
        await finish_requests(rig, *running)
        await finish_requests(rig, behind)


async def test_a_cancelled_request_makes_room_at_once() -> None:
    async with router_rig(small()) as rig:
        running = await start_requests(rig)
        waiting = await rig.accepted(request_id="next", max_tokens=1)
        for _ in running:
            await rig.next_submit("d1")
        rig.dispatcher.cancel("d1-1")
        assert rig.requests.num_waiting == 0, "in the same breath"
        assert (await rig.next_abort("d1")).attempt.request_id == "d1-1"
        assert (await rig.next_submit("d1")).attempt.request_id == "next"
        await running[1].raises(Cancelled)
        for reader in (running[0], running[2], waiting):
            await reader.leaves()


async def test_a_request_that_lost_its_node_goes_first_even_to_a_full_node() -> None:
    async with router_rig(small("d1"), small("d2"), limits=DispatchLimits(min_priority=-5)) as rig:
        running = await start_requests(rig, count=6)
        waiting = await rig.accepted(request_id="waits", max_tokens=1, priority=-5)
        lost = [(await rig.next_submit("d1")).attempt.request_id for _ in range(3)]
        assert len([await rig.next_submit("d2") for _ in range(3)]) == 3
        rig.nodes["d1"].die()
        again = [await rig.next_attempt("d2") for _ in range(3)]
        assert sorted(attempt.request_id for attempt in again) == sorted(lost)
        assert rig.requests.num_waiting == 1
        await all_leave(*running, waiting)


async def test_the_limit_on_waiting_depends_on_what_is_waited_for() -> None:
    limits = DispatchLimits(capacity_wait_s=10.0, queue_wait_s=40.0)
    async with router_rig(small(), limits=limits) as rig:
        running = await start_requests(rig)
        for _ in running:
            await rig.next_submit("d1")
        waiting = await rig.accepted(request_id="full")
        rig.timers.advance(39.0)
        for _ in range(5):
            await rig.tell_all("d1", running=1, waiting=2)
        assert rig.requests.num_waiting == 1
        rig.timers.advance(1.5)
        error = await waiting.raises(Overloaded)
        assert type(error) is Overloaded
        assert str(error) == "every node is full: the best one has as many requests as it runs at once"
        await all_leave(*running)


async def test_all_requests_that_wait_for_a_missing_node_are_refused_in_time() -> None:
    async with router_rig() as rig:
        readers = [await rig.accepted(request_id=f"r{n}") for n in range(3)]
        rig.timers.advance(9.9)
        assert rig.requests.num_waiting == 3
        rig.timers.advance(0.2)
        for reader in readers:
            await reader.raises(NoCapacity, "no node that serves demo is up")


async def test_a_request_too_large_for_every_node_is_refused_before_it_is_accepted() -> None:
    async with router_rig(decode(num_blocks=2)) as rig:
        reader = rig.ask(max_tokens=30)
        await reader.raises(InvalidRequest)
        assert not reader.events
        assert rig.requests.counters.rejections == {"ContextLengthExceeded": 1}


async def test_the_number_of_long_texts_tokenized_at_once_is_limited() -> None:
    async with router_rig(decode(), limits=DispatchLimits(thread_text_chars=2, max_tokenizing=0)) as rig:
        await rig.ask().raises(QueueFull)
        short = rig.ask("ab", max_tokens=1)
        await finish_requests(rig, short)
