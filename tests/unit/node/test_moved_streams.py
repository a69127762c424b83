"""Two nodes, of which one takes a stream over from the other: over a real link, with faked one-sided reads."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from baton.engine.request import Request, RequestStatus
from baton.errors import TransferCause
from baton.messages.ids import AttemptKey
from baton.messages.node import Leg, MoveOut, Outcome
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams
from kv_transfer.link.link_messages import Closing, Offer, SenderMessage
from tests.support.handoff_rig import ATTEMPT, BLOCK_SIZE, KEY, OURS, THEIRS, HandoffRig, content_of, write_block

HAD = AttemptKey("req", 0)
"""The attempt that has the stream. It moves to ATTEMPT."""
HOLDER = str(HAD)
CUT_BY = 20


def stream(num_tokens: int, num_prompt: int = 6) -> Request:
    """A stream of so many tokens, of which the last one has no KV, that is told to move with eight."""
    request = Request(HOLDER, RequestSpec(list(range(num_prompt)), SamplingParams(max_tokens=99)), attempt=HAD)
    request.status = RequestStatus.RUNNING
    request.move, request.seen_from = MoveOut(HAD, ATTEMPT, 8, CUT_BY), num_tokens - 1
    advance(request, num_tokens)
    return request


def advance(request: Request, num_tokens: int) -> None:
    request.output_token_ids = list(range(100 + request.num_prompt_tokens, 100 + num_tokens))
    request.num_computed_tokens = num_tokens - 1


def leg(rig: HandoffRig) -> Request:
    """The decode leg that takes it over."""
    return Request(
        KEY,
        RequestSpec(list(range(6)), SamplingParams(max_tokens=99)),
        leg=Leg.DECODE,
        kv_source=rig.sender.source,
        attempt=ATTEMPT,
        output_token_ids=[106, 107],
        cut_by=CUT_BY,
    )


def step(rig: HandoffRig, request: Request, num_tokens: int) -> None:
    """Commit a step of the stream after which it has so many tokens."""
    advance(request, num_tokens)
    for index in range(-(-request.num_computed_tokens // BLOCK_SIZE)):
        write_block(rig.sender.memory, THEIRS[index], content_of(KEY, index))
    rig.sender.connector.blocks_computed(request, THEIRS, request.num_computed_tokens)


def end(rig: HandoffRig, request: Request, outcome: Outcome) -> Any:
    request.status, request.outcome = RequestStatus.ENDED, outcome
    num_blocks = -(-request.num_exchanged_tokens // BLOCK_SIZE)
    return rig.sender.connector.request_finished(request, THEIRS[:num_blocks], False)


async def begun(rig: HandoffRig, num_tokens: int = 10) -> tuple[Request, Request]:
    """The stream, and its decode leg, whose blocks are reserved."""
    request, decode = stream(num_tokens), leg(rig)
    rig.sender.handoff.move_asked(ATTEMPT, HOLDER)
    rig.sender.connector.move_begun(request)
    rig.receiver.connector.request_added(decode)
    await rig.receiver.recorder.wait_until(lambda: rig.receiver.intake.may_plan(ATTEMPT))
    external = rig.receiver.connector.get_num_new_matched_tokens(decode, 0)
    assert (external.num_tokens, external.seen_from) == (CUT_BY, num_tokens - 1)
    rig.receiver.connector.update_state_after_alloc(decode, OURS, CUT_BY)
    return request, decode


async def test_a_stream_is_handed_over_when_all_but_one_block_is_read() -> None:
    async with HandoffRig() as rig:
        await rig.join()
        request, _ = await begun(rig)
        rig.freeze_reads()
        step(rig, request, 14)
        await rig.wait_for_read()
        assert not rig.sender.connector.may_cut(request), "three blocks are offered, and none is read"
        rig.thaw_reads()
        await rig.sender.recorder.wait_until(lambda: rig.sender.handoff.num_read(ATTEMPT) == 3)
        step(rig, request, 18)
        assert rig.sender.connector.may_cut(request)
        assert end(rig, request, Outcome.HANDED_OFF).value == "leased"
        assert await rig.receiver.recorder.arrival() == tuple(range(108, 118))
        assert list(rig.receiver.intake.arrived_tokens(ATTEMPT)) == list(range(108, 118))
        rig.assert_blocks()
        await rig.sender.recorder.release(HOLDER)
        assert (rig.sender.connector.num_followed, rig.sender.handoff._moves) == (0, {})


async def test_a_stream_that_goes_on_where_it_is_tells_its_reader() -> None:
    async with HandoffRig() as rig:
        await rig.join()
        request, _ = await begun(rig)
        step(rig, request, 14)
        rig.sender.connector.move_ended(HOLDER, ATTEMPT, "it was preempted")
        assert not rig.sender.connector.may_cut(request)
        lost = await rig.receiver.recorder.failure()
        assert (lost.cause, lost.detail) == (TransferCause.LEASE_LOST, "the stream stays where it is: it was preempted")
        step(rig, request, 18)
        request.move = None
        assert end(rig, request, Outcome.LENGTH).value == "leased", "reads may still run"
        await rig.sender.recorder.release(HOLDER)


async def test_blocks_are_kept_for_the_reads_of_all_moves_of_a_stream() -> None:
    async with HandoffRig() as rig:
        await rig.join()
        request, _ = await begun(rig)
        rig.freeze_reads()
        step(rig, request, 14)
        await rig.wait_for_read()
        rig.sender.connector.move_ended(HOLDER, ATTEMPT, "it was preempted")
        await rig.receiver.recorder.failure()
        # A second move, to a node that never comes.
        second = AttemptKey("req", 2)
        rig.sender.handoff.move_asked(second, HOLDER)
        request.move = MoveOut(HAD, second, 8, CUT_BY)
        rig.sender.connector.move_begun(request)
        end(rig, request, Outcome.ABORTED)
        posted = asyncio.Event()
        asyncio.get_running_loop().call_soon_threadsafe(posted.set)
        await posted.wait()
        assert rig.sender.handoff.stats().suspect == 1
        assert not rig.sender.recorder.released
        rig.thaw_reads()
        await rig.sender.recorder.release(HOLDER)


async def test_a_reader_of_a_stream_that_can_not_move_does_not_wait() -> None:
    async with HandoffRig() as rig:
        await rig.join()
        rig.sender.handoff.move_asked(ATTEMPT, HOLDER)
        rig.receiver.connector.request_added(leg(rig))
        await rig.sender.recorder.wait_until(lambda: rig.sender.handoff.book.knows(ATTEMPT))
        rig.sender.connector.move_ended(HOLDER, ATTEMPT, "it is not here any more")
        lost = await rig.receiver.recorder.failure()
        assert lost.cause is TransferCause.REFUSED
        assert not rig.sender.handoff._moves


async def test_an_abort_that_comes_before_the_engine_has_begun_ends_the_move() -> None:
    async with HandoffRig() as rig:
        told = rig.sender.recorder
        rig.sender.handoff.move_asked(ATTEMPT, HOLDER)
        assert rig.sender.handoff.knows(ATTEMPT)
        rig.sender.handoff.aborted(ATTEMPT)
        assert told.moves_ended == [ATTEMPT]
        rig.sender.handoff.aborted(AttemptKey("other", 1))
        assert told.moves_ended == [ATTEMPT]


@pytest.mark.parametrize(
    "wrong",
    [
        Closing(17, tuple(range(109, 118)), ended=False),
        Closing(16, tuple(range(108, 117)), ended=False),
        Closing(20, tuple(range(108, 121)), ended=False),
        Closing(17, (*range(108, 117), 5000), ended=False),
    ],
    ids=["a token is missing", "too few blocks", "more than was reserved", "no token"],
)
async def test_a_stream_that_is_not_what_was_asked_for_is_refused(wrong: Closing) -> None:
    async with HandoffRig() as rig:
        await rig.join()
        request, _ = await begun(rig)
        send = rig.sender.handoff._links.send

        def distort(link: int, message: SenderMessage) -> None:
            if isinstance(message, Offer) and message.closing is not None:
                message = replace(message, closing=wrong)
            send(link, message)

        rig.sender.handoff._links.send = distort  # type: ignore[method-assign]
        step(rig, request, 18)
        end(rig, request, Outcome.HANDED_OFF)
        assert (await rig.receiver.recorder.failure()).cause is TransferCause.REFUSED
        await rig.sender.recorder.release(HOLDER)


@pytest.mark.parametrize("num_tokens", [7, CUT_BY + 1])
async def test_a_node_with_other_tokens_than_the_router_has_is_not_read(num_tokens: int) -> None:
    async with HandoffRig() as rig:
        await rig.join()
        decode = leg(rig)
        rig.sender.handoff.move_asked(ATTEMPT, HOLDER)
        rig.sender.connector.move_begun(stream(num_tokens))
        rig.receiver.connector.request_added(decode)
        await rig.receiver.recorder.wait_until(lambda: rig.receiver.intake.may_plan(ATTEMPT))
        with pytest.raises(ValueError, match="has KV of"):
            rig.receiver.connector.get_num_new_matched_tokens(decode, 0)
