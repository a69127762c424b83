"""Whole hand-offs over a real link with real bytes: what arrives, what fails, and that nothing is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest

from baton.engine.connector import BlockFate, LostKV
from baton.engine.runner import KVMemory
from baton.errors import TransferCause, TransferFailed
from baton.messages.ids import AttemptKey, Peer
from baton.messages.node import Outcome, StageTimings
from baton.runner.blocks.known_bytes import block_filler
from baton.v1 import kv_link_pb2, kv_link_pb2_grpc, node_pb2
from kv_transfer.backends.base import TransferBackend
from kv_transfer.backends.nixl import NixlBackend
from kv_transfer.layout import MAX_PARTS, PROTOCOL_VERSION, LinkIdentity, layout_mismatch
from kv_transfer.link.link import MAX_SPARED, MISSED_HEARTBEATS
from kv_transfer.link.link_client import LinkClient
from kv_transfer.link.link_codec import write_hello, write_reader_message, write_sender_message, write_welcome
from kv_transfer.link.link_messages import (
    AskProbe,
    Closing,
    ConfirmRead,
    LinkHello,
    LinkWelcome,
    MemoryPart,
    Offer,
    ProbeReady,
    ReadConfirmed,
    SenderMessage,
    Subscribe,
)
from kv_transfer.receiver.probe_values import ProbeTimes
from kv_transfer.receiver.transfer_values import TransferState
from kv_transfer.sender.lease_values import LeaseState, LeaseTimes
from tests.doubles.fake_connector import FakeConnector
from tests.doubles.fake_transfer_backend import FakeTransferFabric
from tests.doubles.faulty_transfer_backend import Faults, FaultyTransferBackend
from tests.support.handoff_rig import (
    ATTEMPT,
    BLOCK_BYTES,
    HEARTBEAT_S,
    KEY,
    LAYOUT,
    NUM_BLOCKS,
    OURS,
    THEIRS,
    VOCAB_SIZE,
    WITHIN_S,
    AnnouncingBackend,
    HandoffRig,
    MakeBackend,
    ReceiverHalf,
    Recorder,
    SenderHalf,
    attempt_of,
    decode_leg,
    new_device_memory,
    new_memory,
    write_block,
)


@pytest.fixture
async def rig() -> AsyncIterator[HandoffRig]:
    async with HandoffRig() as made:
        yield made


async def test_bytes_and_first_token_arrive_and_the_lease_ends(rig: HandoffRig) -> None:
    prefill = rig.sender.request()
    decode = rig.reserve()
    measured = StageTimings(queue_ms=4.5, prefill_ms=40.0, cached_tokens=16)
    rig.sender.handoff.timed(ATTEMPT, measured)
    assert rig.sender.finish(prefill) is BlockFate.LEASED
    assert await rig.receiver.recorder.arrival() == (7,)
    assert rig.receiver.intake.prompt_timings(ATTEMPT) == measured
    rig.assert_blocks()
    stats = rig.receiver.connector.stats(ATTEMPT)
    assert stats is not None
    assert stats.num_bytes == 5 * BLOCK_BYTES
    assert rig.sender.recorder.released == [KEY]
    assert "lease_released" in rig.sender.recorder.names(KEY)
    assert rig.receiver.finish(decode, transferring=False) is BlockFate.FREE


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 8, 17, 20])
async def test_prompts_of_any_length_arrive_whole(rig: HandoffRig, num_tokens: int) -> None:
    num_blocks = -(-num_tokens // 4)
    rig.reserve(KEY, num_tokens, OURS[:num_blocks])
    rig.sender.finish(rig.sender.request(KEY, num_tokens), THEIRS[:num_blocks])
    await rig.receiver.recorder.arrival()
    rig.assert_blocks(block_ids=OURS[:num_blocks])


async def test_full_blocks_are_read_while_the_prompt_is_computed(rig: HandoffRig) -> None:
    prefill = rig.sender.request()
    rig.reserve()
    rig.sender.compute(prefill, 6)
    await rig.sender.recorder.wait_for_event("read_progress", value=1)
    rig.sender.compute(prefill, 13)
    await rig.sender.recorder.wait_for_event("read_progress", value=3)
    assert "closing_offered" not in rig.sender.recorder.names(KEY)
    rig.sender.finish(prefill)
    await rig.receiver.recorder.arrival()
    started = [value for name, _, value, _ in rig.receiver.recorder.events if name == "read_started"]
    assert started == [1, 2, 2]
    rig.assert_blocks()


async def test_blocks_cached_at_the_receiver_are_not_read(rig: HandoffRig) -> None:
    rig.reserve(num_local=8)
    rig.sender.finish()
    await rig.receiver.recorder.arrival()
    rig.assert_blocks(first=2)


async def test_an_offer_waits_for_its_subscription(rig: HandoffRig) -> None:
    rig.sender.finish()
    await rig.sender.recorder.wait_for_event("closing_offered")
    assert rig.sender.handoff.book.state(ATTEMPT) is LeaseState.GRANTED
    rig.reserve()
    await rig.receiver.recorder.arrival()
    rig.assert_blocks()


async def test_a_hand_off_over_nixl_arrives_whole() -> None:
    # Incarnations name NIXL agents, so a test with two rigs would need other names.
    async with HandoffRig(make_backend=lambda incarnation, memory, recorder: NixlBackend(incarnation, memory)) as rig:
        prefill = rig.sender.request()
        decode = rig.reserve()
        rig.sender.compute(prefill, 9)
        await rig.sender.recorder.wait_for_event("read_progress")
        rig.sender.finish(prefill)
        await rig.receiver.recorder.arrival()
        rig.assert_blocks()
        assert rig.sender.recorder.released == [KEY]
        assert rig.receiver.finish(decode, transferring=False) is BlockFate.FREE


# The valid blocks of a failed load: the receiver and the fake connector of the engine's tests agree.


def lost_by_fake_connector(num_local: int, num_valid: int) -> LostKV:
    fake = FakeConnector()
    request = decode_leg(KEY, 18, Peer("p0", "p0.first", ""))
    fake.update_state_after_alloc(request, OURS, 18 - num_local)
    return fake.lose(KEY, TransferCause.DIGEST_MISMATCH, "", num_valid)


def nixl_backend(incarnation: str, memory: KVMemory, recorder: Recorder) -> TransferBackend:
    return NixlBackend(incarnation, memory)


@pytest.mark.parametrize("make_backend", [None, nixl_backend], ids=["memory", "nixl"])
@pytest.mark.parametrize(("num_local", "damaged"), [(0, 0), (0, 3), (0, 4), (8, 2), (8, 3)])
async def test_blocks_before_the_first_wrong_one_are_valid(
    num_local: int, damaged: int, make_backend: MakeBackend | None
) -> None:
    async with HandoffRig(make_backend=make_backend, keeps_valid_blocks=True) as rig:
        prefill = rig.sender.request()
        rig.sender.finish(prefill)
        write_block(rig.sender.memory, THEIRS[damaged], b"\x01" * BLOCK_BYTES)
        rig.reserve(num_local=num_local)
        lost = await rig.receiver.recorder.failure()
        assert f"block {OURS[damaged]} is not what p0 computed" in lost.detail
        assert not rig.receiver.recorder.arrived
        assert lost.num_valid_blocks == lost_by_fake_connector(num_local, damaged).num_valid_blocks == damaged
        rig.assert_blocks(block_ids=OURS[:damaged], first=num_local // 4)


@pytest.mark.parametrize("make_backend", [None, nixl_backend], ids=["memory", "nixl"])
async def test_blocks_that_were_confirmed_before_the_sender_was_lost_are_valid(
    make_backend: MakeBackend | None,
) -> None:
    async with HandoffRig(make_backend=make_backend, keeps_valid_blocks=True) as rig:
        prefill = rig.sender.request()
        decode = rig.reserve()
        rig.sender.compute(prefill, 6)
        await rig.receiver.recorder.wait_for_event("prefix_verified")
        rig.sender.compute(prefill, 13)
        await rig.receiver.recorder.wait_for_event("prefix_verified", value=3)
        await rig.sender.server.stop(None)
        lost = await rig.receiver.recorder.failure()
        assert (lost.cause, lost.num_valid_blocks) == (TransferCause.PEER_GONE, 3)
        rig.assert_blocks(block_ids=OURS[:3])
        rig.receiver.finish(decode)
        await rig.receiver.recorder.release()
        rig.sender.finish(prefill)


async def test_blocks_of_a_read_in_flight_at_the_failure_are_not_valid() -> None:
    async with HandoffRig(keeps_valid_blocks=True) as rig:
        prefill = rig.sender.request()
        decode = rig.reserve()
        rig.sender.compute(prefill, 9)
        await rig.receiver.recorder.wait_for_event("prefix_verified")
        rig.freeze_reads()
        rig.sender.finish(prefill)
        await rig.receiver.recorder.wait_until(lambda: rig.receiver.recorder.reads_posted > 1)
        await rig.sender.server.stop(None)
        assert (await rig.receiver.recorder.failure()).num_valid_blocks == 2
        rig.receiver.finish(decode)
        rig.thaw_reads()
        await rig.receiver.recorder.release()


@pytest.mark.parametrize("make_memory", [new_memory, new_device_memory], ids=["host", "device"])
async def test_a_sample_of_one_in_two_compares_every_second_block(make_memory: Callable[[], KVMemory]) -> None:
    async with HandoffRig(make_memory=make_memory, digest_every=2) as rig:
        damaged = {"a#1": 3, "b#1": 2, "b#1@1": 3, "c#1@1": 2}
        for number, (key, index) in enumerate(damaged.items()):
            ours, theirs = ([5 * number + start + i for i in range(5)] for start in (1, 101))
            rig.sender.finish(rig.sender.request(key), theirs)
            write_block(rig.sender.memory, theirs[index], b"\x01" * BLOCK_BYTES)
            rig.reserve(key, block_ids=ours)
        recorder = rig.receiver.recorder
        await recorder.wait_until(lambda: len(recorder.arrived) + len(recorder.failed) == len(damaged))
        assert set(recorder.arrived) == {"a#1", "c#1@1"}
        assert all("is not what p0 computed" in lost.detail for lost in recorder.failed.values())


async def test_a_prompt_arrives_only_once_its_digests_are_computed(rig: HandoffRig) -> None:
    await rig.join()
    gate = rig.receiver.digests.gate
    gate.clear()
    rig.reserve()
    rig.sender.finish()
    await rig.sender.recorder.wait_until(lambda: rig.sender.recorder.has_confirm_read)
    await rig.sender.recorder.release()
    await _wait_until_settled(rig)
    assert rig.receiver.intake.book.state(ATTEMPT) is TransferState.CONFIRMING
    gate.set()
    await rig.receiver.recorder.arrival()
    rig.assert_blocks()


async def test_a_bit_flipped_by_a_read_is_detected() -> None:
    fabric = FakeTransferFabric()

    def make_backend(incarnation: str, memory: KVMemory, recorder: Recorder) -> TransferBackend:
        return FaultyTransferBackend(AnnouncingBackend(fabric, incarnation, memory, recorder), Faults(corrupt=1.0))

    async with HandoffRig(make_backend=make_backend) as rig:
        rig.reserve()
        rig.sender.finish()
        assert "is not what p0 computed" in (await rig.receiver.recorder.failure()).detail
        assert rig.receiver.intake.book.failures == {("p0", TransferCause.DIGEST_MISMATCH): 1}


async def test_an_offer_after_the_stop_raises_no_error() -> None:
    async with HandoffRig() as rig:
        pass
    rig.sender.handoff.offer(ATTEMPT, 0, THEIRS)
    assert rig.sender.recorder.names(KEY)[0] == "lease_granted"


async def test_many_transfers_share_one_link(rig: HandoffRig) -> None:
    keys = [f"r{i}#1" for i in range(240)]
    theirs = {key: [1 + 5 * i + j for j in range(5)] for i, key in enumerate(keys)}
    ours = {key: [NUM_BLOCKS - 1 - 5 * i - j for j in range(5)] for i, key in enumerate(keys)}
    for key in keys:
        rig.reserve(key, block_ids=ours[key])
        prefill = rig.sender.request(key)
        rig.sender.compute(prefill, 9, theirs[key])
        rig.sender.finish(prefill, theirs[key])
    await rig.receiver.recorder.wait_until(lambda: len(rig.receiver.recorder.arrived) == len(keys))
    assert rig.sender.handoff.num_links == 1
    for key in keys:
        rig.assert_blocks(key, ours[key])


async def test_a_request_that_ended_with_its_first_token_still_brings_valid_blocks(rig: HandoffRig) -> None:
    # The engine puts arrived blocks into its prefix cache: unread ones would poison it.
    rig.reserve()
    rig.sender.finish(outcome=Outcome.STOP)
    await rig.receiver.recorder.arrival()
    rig.assert_blocks()


# Aborted by the receiver.


async def test_an_abort_by_the_receiver_while_the_link_opens_frees_its_blocks(rig: HandoffRig) -> None:
    decode = rig.reserve()
    assert rig.receiver.finish(decode) is BlockFate.QUARANTINED
    await rig.receiver.recorder.release()
    assert rig.receiver.intake.book.state(ATTEMPT) is None


async def test_an_abort_by_the_receiver_before_any_offer_frees_both_sides(rig: HandoffRig) -> None:
    decode = rig.reserve()
    await rig.receiver.recorder.wait_for_event("subscribed")
    assert rig.receiver.finish(decode) is BlockFate.QUARANTINED
    await rig.receiver.recorder.release()
    # What is computed later is not kept for a reader that said no.
    await _wait_until_settled(rig)
    rig.sender.finish()
    await rig.sender.recorder.release()


async def test_both_sides_list_a_hand_off_that_is_under_way(rig: HandoffRig) -> None:
    await rig.join()
    rig.freeze_reads()
    prefill = rig.sender.request()
    decode = rig.reserve()
    rig.sender.finish(prefill)
    await rig.wait_for_read()
    (lease,), (transfer,) = rig.sender.handoff.report().open, rig.receiver.intake.report().open
    assert (lease.attempt, lease.state, lease.peer_incarnation, lease.num_blocks) == (ATTEMPT, "READING", "d0.first", 5)
    assert (transfer.attempt, transfer.state, transfer.peer, transfer.num_blocks) == (ATTEMPT, "READING", "p0", 5)
    rig.receiver.finish(decode)
    await rig.receiver.recorder.wait_for_event("quarantined")
    (quarantined,) = rig.receiver.intake.report().open
    assert (quarantined.state, quarantined.num_blocks) == ("QUARANTINED", 5)
    rig.thaw_reads()
    await rig.sender.recorder.release()
    assert not rig.sender.handoff.report().open
    assert not rig.receiver.intake.report().open


async def test_an_abort_by_the_receiver_during_a_read_keeps_both_sides_blocks_until_it_ends(rig: HandoffRig) -> None:
    decode = await rig.reading()
    assert rig.receiver.finish(decode) is BlockFate.QUARANTINED
    await rig.sender.recorder.wait_for_event("lease_suspect")
    assert rig.receiver.intake.counts().quarantined_blocks == 5
    assert not rig.receiver.recorder.released
    assert not rig.sender.recorder.released
    rig.thaw_reads()
    await rig.receiver.recorder.release()
    await rig.sender.recorder.release()
    assert KEY not in rig.receiver.recorder.arrived


# Aborted by the sender.


async def test_an_abort_by_the_sender_before_computing_fails_the_transfer(rig: HandoffRig) -> None:
    rig.reserve()
    await rig.receiver.recorder.wait_for_event("subscribed")
    await _wait_until_settled(rig)
    assert rig.sender.finish(block_ids=[], outcome=Outcome.ABORTED) is BlockFate.FREE
    assert (await rig.receiver.recorder.failure()).cause is TransferCause.CANCELLED


async def test_an_abort_by_the_sender_without_a_reader_releases_its_blocks(rig: HandoffRig) -> None:
    prefill = rig.sender.request()
    rig.sender.compute(prefill, 9)
    assert rig.sender.finish(prefill, outcome=Outcome.ABORTED) is BlockFate.LEASED
    await rig.sender.recorder.release()
    rig.reserve()
    await rig.receiver.recorder.failure()


async def test_an_abort_by_the_sender_during_a_read_keeps_its_blocks_until_it_ends(rig: HandoffRig) -> None:
    await rig.join()
    rig.freeze_reads()
    prefill = rig.sender.request()
    decode = rig.reserve()
    rig.sender.compute(prefill, 9)
    await rig.wait_for_read()
    assert rig.sender.finish(prefill, outcome=Outcome.ABORTED) is BlockFate.LEASED
    await rig.receiver.recorder.failure()
    assert rig.receiver.finish(decode) is BlockFate.QUARANTINED
    assert rig.sender.handoff.book.state(ATTEMPT) is LeaseState.SUSPECT
    assert not rig.sender.recorder.released
    rig.thaw_reads()
    await rig.receiver.recorder.release()
    await rig.sender.recorder.release()


async def test_an_unclaimed_offer_is_released_when_the_router_withdraws_it(rig: HandoffRig) -> None:
    rig.sender.finish()
    await rig.sender.recorder.wait_for_event("closing_offered")
    rig.sender.handoff.withdraw(ATTEMPT, "aborted by the router")
    assert rig.sender.recorder.released == [KEY]


# Leases that end.


async def test_blocks_of_an_expired_lease_are_not_read(rig: HandoffRig) -> None:
    rig.sender.finish()
    await rig.sender.recorder.wait_for_event("closing_offered")
    rig.clock.advance(LeaseTimes().unclaimed_s + 1)
    rig.sender.handoff.tick()
    assert rig.sender.recorder.released == [KEY]
    rig.reserve()
    await rig.receiver.recorder.failure()
    assert KEY not in rig.receiver.recorder.arrived
    assert rig.receiver.recorder.names(KEY).count("read_started") == 0


async def test_blocks_reused_under_a_read_are_never_delivered(rig: HandoffRig) -> None:
    # The sender's engine took the blocks back (preemption) while they were read, and finished from others.
    prefill = rig.sender.request()
    rig.reserve()
    rig.sender.compute(prefill, 9)
    await rig.sender.recorder.wait_for_event("read_progress")
    prefill.num_preemptions += 1
    rig.sender.finish(prefill)
    await rig.receiver.recorder.failure()
    await rig.sender.recorder.release()
    assert KEY not in rig.receiver.recorder.arrived


async def test_heartbeats_keep_a_lease_and_silence_ends_it(rig: HandoffRig) -> None:
    await rig.reading()
    rig.clock.advance(9)
    heartbeats = rig.sender.recorder.heartbeats
    await rig.sender.recorder.wait_until(lambda: rig.sender.recorder.heartbeats > heartbeats)
    rig.clock.advance(9)
    rig.sender.handoff.tick()
    assert rig.sender.handoff.book.state(ATTEMPT) is LeaseState.READING
    rig.clock.advance(20)
    rig.sender.handoff.tick()
    assert rig.sender.handoff.book.state(ATTEMPT) is LeaseState.SUSPECT
    rig.thaw_reads()
    await rig.sender.recorder.release()


# Links that end, and peers that are gone.


async def test_a_cut_link_fails_the_transfer_and_frees_both_sides(rig: HandoffRig) -> None:
    decode = rig.reserve()
    prefill = rig.sender.request()
    rig.sender.compute(prefill, 9)
    await rig.sender.recorder.wait_for_event("read_progress")
    await rig.sender.server.stop(None)
    assert (await rig.receiver.recorder.failure()).cause is TransferCause.PEER_GONE
    rig.receiver.finish(decode)
    await rig.receiver.recorder.release()
    rig.sender.finish(prefill)
    await rig.sender.recorder.wait_for_event("lease_suspect")
    await _wait_until_settled(rig)
    assert not rig.sender.recorder.released
    rig.pass_grace()
    assert rig.sender.recorder.released == [KEY]


class _Floods:
    """Sends more than a link holds as soon as it is open, and cuts it for another reason then."""

    client: LinkClient

    def __init__(self) -> None:
        self.ended: asyncio.Future[TransferFailed] = asyncio.get_running_loop().create_future()

    def link_up(self, welcome: LinkWelcome) -> None:
        for number in range(10_000):
            self.client.send(AskProbe(number))
        self.client.cut(TransferFailed(TransferCause.PROBE_FAILED, "wrong bytes"))

    def link_received(self, incarnation: str, message: SenderMessage) -> None: ...

    def link_down(self, incarnation: str, error: TransferFailed) -> None:
        self.ended.set_result(error)


async def test_a_link_that_its_reader_cuts_twice_ends_with_the_error_of_the_first(rig: HandoffRig) -> None:
    handler = _Floods()
    handler.client = LinkClient(rig.receiver.identity, rig.sender.source, handler, HEARTBEAT_S)
    async with asyncio.timeout(WITHIN_S):
        error = await handler.ended
    assert error.cause is TransferCause.PEER_GONE
    assert "the peer does not take its messages" in error.detail
    await handler.client.close()


async def test_a_link_cut_under_a_running_read_keeps_the_blocks(rig: HandoffRig) -> None:
    decode = await rig.reading()
    await rig.sender.server.stop(None)
    await rig.receiver.recorder.failure()
    rig.receiver.finish(decode)
    await _wait_until_settled(rig)
    assert rig.receiver.intake.book.state(ATTEMPT) is TransferState.QUARANTINED
    assert not rig.receiver.recorder.released
    rig.thaw_reads()
    await rig.receiver.recorder.release()


async def test_after_a_cut_the_next_request_opens_a_new_link_to_memory_that_stayed_connected(rig: HandoffRig) -> None:
    rig.reserve("a#1")
    await rig.receiver.recorder.wait_for_event("subscribed", "a#1")
    # The reader may have its welcome before the sender has the link.
    await rig.sender.recorder.wait_until(lambda: rig.sender.recorder.heartbeats > 0)
    rig.sender.handoff._links.cut(1, "test")
    await rig.receiver.recorder.wait_until(lambda: "a#1" in rig.receiver.recorder.failed)
    rig.reserve()
    rig.sender.finish()
    await rig.receiver.recorder.arrival()
    rig.assert_blocks()
    assert not rig.receiver.recorder.dropped_peers


async def test_a_sender_that_is_gone_is_dropped_with_its_memory(rig: HandoffRig) -> None:
    rig.reserve()
    await rig.receiver.recorder.wait_for_event("subscribed")
    await rig.sender.stop()
    await rig.receiver.recorder.wait_until(lambda: rig.receiver.recorder.dropped_peers == ["p0.first"])
    assert rig.receiver.recorder.failed[KEY].cause is TransferCause.PEER_GONE


async def test_a_restarted_sender_replaces_its_predecessor() -> None:
    async with HandoffRig() as rig:
        rig.reserve("a#1")
        await rig.receiver.recorder.wait_for_event("subscribed", "a#1")
        # It still listens, so that nothing but its successor tells that it is no more.
        rig.sender.handoff._links.close()
        await rig.receiver.recorder.wait_until(lambda: "a#1" in rig.receiver.recorder.failed)
        successor = SenderHalf(rig.make_backend, LinkIdentity("c", "p0", "p0.second", LAYOUT), rig.clock)
        await successor.start()
        rig.receiver.reserve(successor.source)
        successor.finish()
        await rig.receiver.recorder.arrival()
        assert rig.receiver.recorder.dropped_peers == ["p0.first"]
        await successor.stop()


async def test_heartbeats_keep_an_idle_link(rig: HandoffRig) -> None:
    # However long no offer comes: a request that is queued on a living sender is not lost.
    rig.reserve()
    await rig.sender.recorder.wait_until(lambda: rig.sender.recorder.heartbeats > 3 * MISSED_HEARTBEATS)
    assert not rig.receiver.recorder.failed
    rig.sender.finish()
    await rig.receiver.recorder.arrival()


async def test_an_agent_that_dies_under_a_read_fails_it(rig: HandoffRig) -> None:
    decode = await rig.reading()
    rig.fabric.kill(rig.sender.identity.incarnation)
    await rig.receiver.recorder.failure()
    rig.receiver.finish(decode)
    await rig.receiver.recorder.release()


@pytest.mark.parametrize("listens", [False, True], ids=["gone", "there"])
async def test_a_reader_whose_process_is_gone_gets_no_grace(listens: bool) -> None:
    async with HandoffRig() as rig:
        other = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
        address = f"127.0.0.1:{other.sockets[0].getsockname()[1]}"
        if not listens:
            other.close()
            await other.wait_closed()
        reader = ReceiverHalf(rig.make_backend, LinkIdentity("c", "d1", "d1.first", LAYOUT, address))
        await reader.start()
        await rig.join(reader)
        rig.freeze_reads()
        reader.reserve(rig.sender.source)
        rig.sender.finish()
        await reader.recorder.wait_until(lambda: reader.recorder.reads_posted > 0)
        await reader.stop()
        await rig.sender.recorder.wait_for_event("lease_suspect")
        if listens:
            rig.clock.advance(LeaseTimes().grace_s + 1)
            rig.sender.handoff.tick()
        await rig.sender.recorder.release()
        (why,) = [detail for name, _, _, detail in rig.sender.recorder.events if name == "lease_released"]
        assert why == ("grace over" if listens else "reader gone")
        other.close()


async def test_a_restarted_reader_ends_its_predecessor(rig: HandoffRig) -> None:
    await rig.reading()
    identity = LinkIdentity("c", "d0", "d0.second", LAYOUT)
    successor = ReceiverHalf(rig.make_backend, identity)
    await successor.start()
    successor.reserve(rig.sender.source, "other#1")
    await rig.sender.recorder.release()
    await rig.receiver.recorder.failure()
    await successor.stop()
    rig.thaw_reads()


# Refusals.


@pytest.mark.parametrize(
    ("source", "cluster", "cause", "story"),
    [
        ({"address": "127.0.0.1:1"}, "c", TransferCause.PEER_GONE, ""),
        ({"incarnation": "p0.old"}, "c", TransferCause.PEER_GONE, "p0.first, not p0.old"),
        ({}, "elsewhere", TransferCause.REFUSED, ""),
    ],
    ids=["nobody listens", "an older incarnation", "another cluster"],
)
async def test_a_sender_that_is_another_than_the_reader_means_gives_no_kv(
    source: dict[str, str], cluster: str, cause: TransferCause, story: str
) -> None:
    async with HandoffRig(cluster=cluster) as rig:
        rig.receiver.reserve(replace(rig.sender.source, **source))
        failed = await rig.receiver.recorder.failure()
        assert failed.cause is cause
        assert story in failed.detail


async def test_layouts_that_differ_are_refused_with_both_printed() -> None:
    other = replace(LAYOUT, numerics="cuda-7", block_size=8)
    async with HandoffRig(receiver_layout=other) as rig:
        rig.reserve()
        await rig.receiver.recorder.failure()
        story = rig.receiver.recorder.failed[KEY].detail
        assert rig.receiver.recorder.failed[KEY].cause is TransferCause.LAYOUT_MISMATCH
        assert "numerics, block_size" in story
        assert str(LAYOUT) in story
        assert str(other) in story
        # Operators see it on both sides, with the nodes' names.
        for half, peer in ((rig.receiver.intake, "p0"), (rig.sender.handoff, "d0")):
            (refused,) = half.report().refused_links
            assert (refused.peer, refused.cause, refused.count) == (peer, "layout_mismatch", 1)
            assert f"p0 [{LAYOUT}]" in refused.story
            assert f"d0 [{other}]" in refused.story


async def test_nodes_that_both_pair_across_numerics_exchange_kv_and_pull_none() -> None:
    ours, theirs = replace(LAYOUT, kv_shape="shape"), replace(LAYOUT, kv_shape="shape", numerics="cuda-7")
    for other in (replace(theirs, kv_shape=""), replace(theirs, kv_shape="other")):
        assert "differ in numerics, kv_shape" in str(layout_mismatch(ours, other))
    assert layout_mismatch(ours, LAYOUT) is None, "of equal numerics, whatever the other one is told"
    async with HandoffRig(sender_layout=ours, receiver_layout=theirs) as rig:
        await rig.join()
        decode = rig.reserve()
        rig.sender.finish()
        await rig.receiver.recorder.arrival()
        rig.assert_blocks()
        assert not rig.receiver.intake.holders.may_pull(rig.sender.source.incarnation)
        with pytest.raises(ValueError, match="p0 computes under other numerics"):
            rig.receiver.connector.get_num_new_matched_tokens(decode_leg("other#1", 4, rig.sender.source), 0)
        rig.receiver.finish(decode, transferring=False)


# Peers that break the rules.


class MisbehavingSender(kv_link_pb2_grpc.KvLinkServicer):
    """Welcomes a reader like a prefill node, and lets its probe pass; then sends what the test wants, no heartbeats."""

    answers_probes = True
    other_parts: Sequence[MemoryPart] = ()

    def __init__(self, rig: HandoffRig, answers: Callable[[kv_link_pb2.OpenRequest], list[SenderMessage]]) -> None:
        self._answers = answers
        self._memory = memory = rig.sender.memory
        at = memory.base_address
        self._welcome = LinkWelcome(
            "p0", "p0.first", LAYOUT, b"memory:p0.first", at, NUM_BLOCKS, "DRAM", 0, 50, memory.num_probe_blocks
        )
        self._welcome = replace(self._welcome, other_parts=self.other_parts)

    async def Open(self, request_iterator: Any, context: Any) -> None:
        await context.read()
        await context.write(write_welcome(self._welcome))
        while isinstance(request := await context.read(), kv_link_pb2.OpenRequest):
            answers = self._answers(request)
            if request.HasField("ask_probe") and self.answers_probes:
                digest = block_filler(self._memory)(NUM_BLOCKS, "known")[1]
                answers.append(ProbeReady(request.ask_probe.probe, NUM_BLOCKS, digest))
            for answer in answers:
                await context.write(write_sender_message(answer))


@asynccontextmanager
async def misbehaving(
    rig: HandoffRig,
    answers: Callable[[kv_link_pb2.OpenRequest], list[SenderMessage]] = lambda request: [],
    is_running: bool = True,
) -> AsyncIterator[Peer]:
    """A sender that answers so instead of the rig's own. `is_running`: its process says that it is there."""
    rig.receiver.recorder.is_peer_running = is_running
    server = grpc.aio.server()
    kv_link_pb2_grpc.add_KvLinkServicer_to_server(MisbehavingSender(rig, answers), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield Peer("p0", "p0.first", f"127.0.0.1:{port}")
    finally:
        await server.stop(None)


@asynccontextmanager
async def scripted_reader(rig: HandoffRig, address: str = "") -> AsyncIterator[Any]:
    """The call of a reader without heartbeats, which has subscribed to a prompt that is computed."""
    rig.sender.finish()
    rig.sender.recorder.is_peer_running = True
    async with grpc.aio.insecure_channel(rig.sender.source.address) as channel:
        call = kv_link_pb2_grpc.KvLinkStub(channel).Open()
        hello = LinkHello(PROTOCOL_VERSION, "c", "d9", "d9.first", "p0.first", LAYOUT, address)
        await call.write(write_hello(hello))
        await call.write(write_reader_message(Subscribe(ATTEMPT, 0)))
        yield call


BAD_OFFERS = {
    "out of the pool": Offer(ATTEMPT, 0, (1, NUM_BLOCKS), 1000),
    "huge": Offer(ATTEMPT, 0, (2**32 - 1,), 1000),
    "too many": Offer(ATTEMPT, 0, (1, 2, 3, 4, 5, 6), 1000),
    "a gap": Offer(ATTEMPT, 1, (1,), 1000),
    "one block twice": Offer(ATTEMPT, 0, (1, 1), 1000),
    "closing too early": Offer(ATTEMPT, 0, (1, 2), 1000, Closing(18, (7,), False)),
    "another prompt": Offer(ATTEMPT, 0, (1, 2, 3, 4, 5), 1000, Closing(17, (7,), False)),
    "no first token": Offer(ATTEMPT, 0, (1, 2, 3, 4, 5), 1000, Closing(18, (), False)),
    "a token that there is not": Offer(ATTEMPT, 0, (1, 2, 3, 4, 5), 1000, Closing(18, (VOCAB_SIZE,), False)),
}


@pytest.mark.parametrize("offer", BAD_OFFERS.values(), ids=BAD_OFFERS.keys())
async def test_a_bad_offer_is_refused_before_anything_is_read(rig: HandoffRig, offer: Offer) -> None:
    async with misbehaving(rig, lambda request: [offer] if request.HasField("subscribe") else []) as source:
        rig.receiver.reserve(source)
        assert (await rig.receiver.recorder.failure()).cause is TransferCause.REFUSED
        assert "read_started" not in rig.receiver.recorder.names(KEY)


@pytest.mark.parametrize(
    ("num_others", "cause"), [(MAX_PARTS, TransferCause.REFUSED), (1, TransferCause.LAYOUT_MISMATCH)]
)
async def test_a_sender_whose_memories_can_not_be_used_is_refused(
    rig: HandoffRig, monkeypatch: pytest.MonkeyPatch, num_others: int, cause: TransferCause
) -> None:
    monkeypatch.setattr(MisbehavingSender, "other_parts", [MemoryPart(range(1), b"x", 1, "DRAM", 0)] * num_others)
    async with misbehaving(rig) as source:
        rig.receiver.reserve(source)
        assert (await rig.receiver.recorder.failure()).cause is cause


@pytest.mark.parametrize("runs", [False, True])
async def test_a_silent_sender_is_lost_and_spared_for_a_while_if_its_process_runs(rig: HandoffRig, runs: bool) -> None:
    async with misbehaving(rig, is_running=runs) as source:
        rig.receiver.reserve(source)
        assert "no heartbeat" in (await rig.receiver.recorder.failure()).detail
        assert rig.receiver.recorder.probed_addresses == [source.address] * (MAX_SPARED + 1 if runs else 1)


async def test_a_silent_sender_whose_process_runs_is_lost_with_its_link_and_has_failed_no_probe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(MisbehavingSender, "answers_probes", False)
    # The link is lost later than a probe of which nothing is heard.
    times = ProbeTimes(tick_s=HEARTBEAT_S, max_quiet_ticks=2 * MISSED_HEARTBEATS)
    async with HandoffRig(probe_times=times) as rig, misbehaving(rig) as source:
        rig.receiver.intake.expect(ATTEMPT, source)
        assert (await rig.receiver.recorder.failure()).cause is TransferCause.PEER_GONE
        assert not rig.receiver.intake.probes.outcomes


async def test_a_silent_reader_whose_process_runs_keeps_its_lease(rig: HandoffRig) -> None:
    async with scripted_reader(rig, "somewhere:9") as call:
        await rig.sender.recorder.wait_until(lambda: rig.sender.handoff.book.state(ATTEMPT) is LeaseState.READING)
        for _ in range(3):
            rig.clock.advance(LeaseTimes().lease_s - 1)
            await _wait_for_heartbeat(rig)
            rig.sender.handoff.tick()
        assert rig.sender.handoff.book.state(ATTEMPT) is LeaseState.READING
        assert set(rig.sender.recorder.probed_addresses) == {"somewhere:9"}
        rig.sender.recorder.is_peer_running = False
        await rig.sender.recorder.wait_for_event("lease_suspect")
        call.cancel()


async def test_kv_is_not_used_when_the_sender_denies_the_lease_although_all_bytes_arrived(rig: HandoffRig) -> None:
    def answers(request: kv_link_pb2.OpenRequest) -> list[SenderMessage]:
        if request.HasField("subscribe"):
            return [Offer(ATTEMPT, 0, (1, 2, 3, 4, 5), 1000, Closing(18, (7,), False))]
        if request.HasField("confirm_read"):
            return [ReadConfirmed(ATTEMPT, False)]
        return []

    async with misbehaving(rig, answers) as source:
        rig.receiver.reserve(source)
        assert (await rig.receiver.recorder.failure()).cause is TransferCause.LEASE_LOST
        assert "read_done" in rig.receiver.recorder.names(KEY)
        assert not rig.receiver.recorder.arrived


async def test_a_silent_reader_loses_its_link_and_its_lease(rig: HandoffRig) -> None:
    async with scripted_reader(rig) as call:
        # Somebody else's lease is none of its business, and nonsense is skipped.
        await call.write(write_reader_message(ConfirmRead(AttemptKey("other", 1))))
        await call.write(kv_link_pb2.OpenRequest())
        seen: list[str | None] = []
        await _read_until(call, seen, "read_confirmed")
        rig.sender.recorder.is_peer_running = False
        with pytest.raises(grpc.aio.AioRpcError) as lost:
            await _read_until(call, seen)
        assert "no heartbeat" in str(lost.value.details())
        assert [name for name in seen if name != "heartbeat"] == ["welcome", "offer", "read_confirmed"]
    await rig.sender.recorder.wait_for_event("lease_suspect")
    rig.pass_grace()
    assert rig.sender.recorder.released == [KEY]
    assert rig.sender.handoff.book.counters["confirm_read_unknown"] == 1


async def test_a_link_begins_with_hello(rig: HandoffRig) -> None:
    async with grpc.aio.insecure_channel(rig.sender.source.address) as channel:
        call = kv_link_pb2_grpc.KvLinkStub(channel).Open()
        subscribe = kv_link_pb2.Subscribe(attempt=node_pb2.Attempt(request_id="req", attempt=1))
        await call.write(kv_link_pb2.OpenRequest(subscribe=subscribe))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def _wait_for_heartbeat(rig: HandoffRig) -> None:
    """Return once the sender has received one more heartbeat, or counted the peer as running instead."""
    heartbeats = rig.sender.recorder.heartbeats
    await rig.sender.recorder.wait_until(lambda: rig.sender.recorder.heartbeats > heartbeats)


async def _read_until(call: Any, seen: list[str | None], last: str = "the end") -> None:
    async with asyncio.timeout(WITHIN_S):
        while last not in seen:
            seen.append((await call.read()).WhichOneof("message"))


async def _wait_until_settled(rig: HandoffRig) -> None:
    """Return once each side has processed everything that the other has sent so far."""
    marker = f"marker{len(rig.sender.recorder.events)}#1"
    request = rig.reserve(marker, 4, [0])
    # The sender may have welcomed the receiver and not have its link yet: its answer says that it has.
    rig.sender.handoff.withdraw(attempt_of(marker), "marker")
    await rig.receiver.recorder.wait_until(lambda: marker in rig.receiver.recorder.failed)
    rig.receiver.finish(request, block_ids=[0])
    await rig.receiver.recorder.wait_until(lambda: marker in rig.receiver.recorder.released)
    rig.receiver.recorder.released.remove(marker)
