"""Losses of many nodes at once, and of the only node that is large enough: no stream ends that could continue."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise

import pytest

from baton.errors import InvalidRequest, NoCapacity, Status
from baton.messages.node import Leg, Outcome, RequestDelta, Submit
from router.admission.limits import DispatchLimits
from router.flight.flight_table import AttemptCause
from router.live_requests import PLACED_PER_TURN
from router.losses import FLIGHTS_PER_TURN
from router.placement.placer import PlacementSettings, Placer, Policy
from router.placement.view import SIZE_REMEMBERED_S
from tests.support.router_parts import decode, prefill
from tests.support.router_rig import Reader, RouterRig, all_leave, router_rig

POLICIES = [Policy.COST, Policy.LEAST_LOADED]


async def turns(number: int) -> None:
    """Let the loop run this number of turns."""
    for _ in range(number):
        await asyncio.sleep(0)


async def answer(rig: RouterRig) -> None:
    """Let every node hand off its new requests, or report their next two tokens."""
    for node in rig.nodes.values():
        while not node.inbox.empty():
            if isinstance(message := node.inbox.get_nowait(), Submit):
                given = len(message.output_token_ids)
                if message.leg is Leg.PREFILL:
                    node.report(RequestDelta(message.attempt, given, (97,), outcome=Outcome.HANDED_OFF))
                else:
                    node.report(RequestDelta(message.attempt, given, (97, 98)))
        if node.is_up:
            await node.all_read()


async def streaming(rig: RouterRig, number: int) -> Sequence[Reader]:
    """Start this number of clients, and return when each has read tokens."""
    readers = [rig.ask(request_id=f"r{i}", max_tokens=40) for i in range(number)]
    await rig.wait_until(lambda: rig.requests.num_placed == number)
    await answer(rig)
    for reader in readers:
        await reader.wait_for_tokens(2)
    return readers


@pytest.mark.parametrize("policy", POLICIES)
async def test_simultaneous_losses_are_all_known_before_a_stream_is_placed_again(policy: Policy) -> None:
    nodes = [make(f"{role}{i}") for i in range(12) for role, make in (("p", prefill), ("d", decode))]
    async with router_rig(*nodes, placer=Placer(PlacementSettings(policy))) as rig:
        readers = await streaming(rig, 100)
        for node in rig.nodes.values():
            node.die()
        await rig.wait_until_attached(0)
        in_each_turn = [rig.requests.num_waiting]
        while rig.requests.num_waiting < 100:
            await turns(1)
            in_each_turn.append(rig.requests.num_waiting)
        assert max(b - a for a, b in pairwise(in_each_turn)) <= FLIGHTS_PER_TURN
        assert rig.requests.counters.attempts == {AttemptCause.FIRST: 100}

        for node in rig.nodes.values():
            node.is_up = True
        rig.timers.advance(10)
        waiting = [100]
        while rig.requests.num_waiting:
            await turns(1)
            waiting.append(rig.requests.num_waiting)
        assert max(a - b for a, b in pairwise(waiting)) <= PLACED_PER_TURN
        await answer(rig)
        for reader in readers:
            await reader.wait_for_tokens(4)
        assert rig.requests.counters.failed == 0
        await all_leave(*readers)


@pytest.mark.parametrize("policy", POLICIES)
async def test_losses_that_are_found_one_by_one_end_no_stream(policy: Policy) -> None:
    nodes = [make(f"{role}{i}") for i in range(20) for role, make in (("p", prefill), ("d", decode))]
    async with router_rig(*nodes, placer=Placer(PlacementSettings(policy))) as rig:
        readers = await streaming(rig, 40)
        for node in rig.nodes.values():
            node.die()
            await turns(3)
        await rig.wait_until(lambda: rig.requests.num_waiting == 40)
        assert rig.requests.counters.attempts[AttemptCause.NODE_LOST] > 0
        assert rig.requests.counters.failed == 0
        await all_leave(*readers)


async def test_a_stream_waits_for_the_only_node_large_enough_and_delays_no_other() -> None:
    small = decode("d2", max_model_len=16, num_blocks=4)
    async with router_rig(decode("d1"), small) as rig:
        reader = rig.ask("hello", request_id="r", max_tokens=40)
        attempt = await rig.next_attempt("d1")
        rig.report("d1", attempt, 0, "abc")
        await reader.wait_for_tokens(3)
        rig.nodes["d1"].die()
        await rig.wait_until_attached(1)
        await rig.wait_until(lambda: rig.requests.num_waiting == 1)

        other = rig.ask("hello", max_tokens=1)
        await rig.serve("d2", text="x")
        await other.finished()
        refused = await rig.ask("hello", max_tokens=40).raises(NoCapacity, "was lost a short time ago")
        assert refused.status is Status.UNAVAILABLE
        assert refused.retry_after_s is not None

        rig.nodes["d1"].is_up = True
        rig.timers.advance(10)
        submit = await rig.next_submit("d1")
        assert list(submit.output_token_ids) == [97, 98, 99]
        assert (await rig.end(reader, "d1", submit.attempt, 3, "d" * 37)).completion_tokens == 40


async def test_a_stream_waits_for_a_large_enough_node_only_up_to_a_limit() -> None:
    limits = DispatchLimits(recovery_wait_s=5.0)
    async with router_rig(decode("d1"), decode("d2", max_model_len=16), limits=limits) as rig:
        reader = rig.ask("hello", max_tokens=40)
        await rig.next_submit("d1")
        rig.nodes["d1"].die()
        await rig.wait_until_attached(1)
        await rig.wait_until(lambda: rig.requests.num_waiting == 1)
        rig.timers.advance(5.1)
        await reader.raises(NoCapacity, "large enough")


async def test_a_request_is_too_large_once_no_node_of_its_size_was_up_for_long() -> None:
    async with router_rig(decode("d1"), decode("d2", max_model_len=16)) as rig:
        rig.nodes["d1"].die()
        await rig.wait_until_attached(1)
        rig.timers.advance(SIZE_REMEMBERED_S + 1)
        rig.nodes["d1"].is_up = False
        await rig.ask("hello", max_tokens=40).raises(InvalidRequest, "more than any node's KV cache holds")
