"""Two nodes, of which one pulls what the other one has cached: over a real link, with faked one-sided reads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from baton.engine.connector import ExternalTokens, Pin
from baton.engine.request import Request
from baton.errors import TransferCause
from baton.messages.ids import AttemptKey
from baton.messages.node import HeldPrefix
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams
from baton.node.kv.offer_connector import OfferConnector
from kv_transfer.link.link_messages import OfferLost, Pull, SenderMessage
from tests.support.handoff_rig import (
    ATTEMPT,
    BLOCK_SIZE,
    KEY,
    KV_LAYOUT,
    NUM_BLOCKS,
    OURS,
    THEIRS,
    HandoffRig,
    attempt_of,
    content_of,
    write_block,
)

KEYS = [bytes([number]) * 32 for number in range(4)]


def request(rig: HandoffRig, attempt: AttemptKey = ATTEMPT) -> Request:
    held = HeldPrefix(rig.sender.source, 16)
    one = Request(KEY, RequestSpec(list(range(18)), SamplingParams()), attempt=attempt, held_prefix=held)
    one.block_hashes = list(KEYS)
    return one


async def asked(rig: HandoffRig, one: Request) -> Pin:
    """Ask for the request's first tokens; return what the sender's engine is asked."""
    connector = rig.receiver.connector
    assert connector.get_num_new_matched_tokens(one, 0).num_tokens is None
    await rig.sender.recorder.wait_until(lambda: bool(rig.sender.recorder.pins))
    return rig.sender.recorder.pins.pop()


async def test_what_the_other_node_keeps_is_read_and_then_let_go() -> None:
    async with HandoffRig() as rig:
        await rig.join()
        one = request(rig)
        pin = await asked(rig, one)
        assert list(pin.keys) == KEYS
        for index, block in enumerate(THEIRS[:3]):
            write_block(rig.sender.memory, block, content_of(KEY, index))
        rig.sender.connector.pinned(pin, THEIRS[:3])
        await rig.receiver.recorder.wait_until(lambda: rig.receiver.intake.num_kept(ATTEMPT) is not None)
        answer = rig.receiver.connector.get_num_new_matched_tokens(one, BLOCK_SIZE)
        assert answer == ExternalTokens(2 * BLOCK_SIZE, load_async=True), (
            "one block is here, and the fourth is not there"
        )
        one.pulled_end = 3 * BLOCK_SIZE
        rig.receiver.connector.update_state_after_alloc(one, OURS[:3], 2 * BLOCK_SIZE)
        assert await rig.receiver.recorder.arrival() == ()
        rig.assert_blocks(block_ids=OURS[:3], first=1)
        assert rig.receiver.connector.load_failed(one, OURS[:3]).value == "free"
        await rig.sender.recorder.release(pin.holder)
        assert rig.receiver.connector.num_followed == 0


async def test_a_reader_is_woken_when_there_is_nothing_to_be_read() -> None:
    async with HandoffRig() as rig:
        await rig.join()
        one = request(rig)
        pin, woken = await asked(rig, one), rig.receiver.recorder.num_told
        rig.sender.connector.pinned(pin, ())
        await rig.receiver.recorder.wait_until(lambda: rig.receiver.recorder.num_told > woken)
        assert rig.receiver.connector.get_num_new_matched_tokens(one, 0).num_tokens == 0
        assert rig.receiver.connector.num_followed == 0
        assert not rig.receiver.recorder.failed, "the request is computed"


async def test_a_reader_that_has_no_use_for_it_any_more_lets_it_go() -> None:
    async with HandoffRig() as rig:
        await rig.join()
        one = request(rig)
        pin = await asked(rig, one)
        rig.sender.connector.pinned(pin, THEIRS[:4])
        await rig.receiver.recorder.wait_until(lambda: rig.receiver.intake.num_kept(ATTEMPT) is not None)
        assert rig.receiver.connector.get_num_new_matched_tokens(one, 16).num_tokens == 0
        await rig.sender.recorder.release(pin.holder)


async def test_between_steps_some_digests_are_computed_and_those_that_are_known_are_not_waited_for() -> None:
    async with HandoffRig() as rig:
        await rig.join()
        due, now, sender = list[Callable[[], None]](), lambda action: action(), rig.sender
        connector = OfferConnector(sender.handoff, KV_LAYOUT, now, now, due.append, per_step=1)
        for attempt, num_steps in ((ATTEMPT, 3), (attempt_of("req#2"), 1)):
            one = request(rig, attempt)
            pin = await asked(rig, one)
            connector.pinned(pin, THEIRS[:3])
            for step in range(num_steps):
                assert len(due) == 1
                told = sender.recorder.num_told
                due.pop()()
                assert sender.recorder.num_told - told == (step < num_steps - 1), "an idle engine has to be woken"
            assert not due
            rig.receiver.connector.request_finished(one, (), False)
            await sender.recorder.release(pin.holder)
            sender.recorder.released.clear()


@pytest.mark.parametrize("keys", [(), (b"short",), (bytes(32),) * (NUM_BLOCKS + 1)])
async def test_keys_that_are_none_are_refused_before_the_engine_hears_of_them(keys: tuple[bytes, ...]) -> None:
    async with HandoffRig() as rig:
        await rig.join()
        told: list[SenderMessage] = []
        rig.sender.handoff._links.send = lambda link, message: told.append(message)  # type: ignore[method-assign]
        rig.sender.handoff.link_received(0, Pull(ATTEMPT, keys))
        assert [isinstance(lost, OfferLost) and lost.cause for lost in told] == [TransferCause.REFUSED]
        assert not rig.sender.recorder.pins


async def test_a_node_keeps_blocks_for_eight_pulls_at_once() -> None:
    async with HandoffRig() as rig:
        await rig.join()
        link = next(iter(rig.sender.handoff._readers))
        for number in range(9):
            rig.sender.handoff.link_received(link, Pull(attempt_of(f"r{number}#1"), tuple(KEYS)))
            rig.sender.handoff.link_received(link, Pull(attempt_of(f"r{number}#1"), tuple(KEYS)))
        assert [pin.attempt.request_id for pin in rig.sender.recorder.pins] == [f"r{number}" for number in range(8)]
        assert rig.sender.handoff.book.counters["duplicate_pull"] == 8


async def test_a_prompt_does_not_wait_for_a_node_that_takes_no_pulls() -> None:
    async with HandoffRig() as rig:
        await rig.join()
        holders, name = rig.receiver.intake.holders, rig.sender.source.incarnation
        # As if the sender were of an earlier version.
        holders.link_down(name)
        holders.link_up(name, takes_pulls=False)
        told, posted = rig.receiver.recorder.num_told, asyncio.Event()
        rig.receiver.connector.request_added(request(rig))
        assert holders.is_meeting(name)
        asyncio.get_running_loop().call_soon_threadsafe(posted.set)
        await posted.wait()
        # At once, and not when a timer is over.
        assert not holders.is_meeting(name)
        assert rig.receiver.recorder.num_told == told + 1
        assert rig.receiver.connector.get_num_new_matched_tokens(request(rig), 0).num_tokens == 0


async def test_a_link_over_which_nothing_is_read_is_closed_and_opened_again_when_it_is_needed() -> None:
    async with HandoffRig() as rig:
        intake, name = rig.receiver.intake, rig.sender.source.incarnation
        told = rig.receiver.recorder
        rig.receiver.connector.request_added(request(rig))
        await told.wait_until(lambda: intake.holders.may_pull(name))
        intake.close_idle_links(3600.0)
        one = request(rig)
        pin = await asked(rig, one)
        intake.close_idle_links(0.0)
        assert intake.num_links == 1, "a request waits for what the other node says"
        rig.sender.connector.pinned(pin, ())
        await told.wait_until(lambda: intake.num_kept(ATTEMPT) is not None)
        assert rig.receiver.connector.get_num_new_matched_tokens(one, 0).num_tokens == 0
        intake.close_idle_links(0.0)
        for _ in range(100_000):
            if intake.num_links or rig.sender.handoff.num_links:
                await asyncio.sleep(0)
        assert not intake.holders.may_pull(name)
        rig.receiver.connector.request_added(request(rig))
        await told.wait_until(lambda: intake.holders.may_pull(name))
        intake.sender_joined(rig.sender.source)
        link = intake.links._links[name]
        intake.close_idle_links(0.0)
        await asked(rig, request(rig))
        assert intake.links._links[name] is link, "it proves that the pair can hand over"
