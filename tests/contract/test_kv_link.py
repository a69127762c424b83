"""Whole hand-offs over a real link with real bytes: what arrives, what fails, and that nothing is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
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
from kv_transfer.layout import MAX_PARTS, PROTOCOL_VERSION, LinkIdentity
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
    BLOCK_BYTES,
    HEARTBEAT_S,
    LAYOUT,
    NUM_BLOCKS,
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

KEY = "req#1"
ATTEMPT = AttemptKey("req", 1)
THEIRS = [5, 6, 7, 20, 21]
OURS = [40, 41, 42, 43, 10]


@pytest.fixture
async def rig() -> AsyncIterator[HandoffRig]:
    async with HandoffRig() as made:
        yield made


async def test_bytes_and_first_token_arrive_and_the_lease_ends(rig: HandoffRig) -> None:
    prefill = rig.sender.request(KEY, 18)
    decode = rig.receiver.reserve(KEY, 18, rig.sender.source, OURS)
    measured = StageTimings(queue_ms=4.5, prefill_ms=40.0, cached_tokens=16)
    rig.sender.handoff.timed(ATTEMPT, measured)
    assert rig.sender.finish(prefill, THEIRS) is BlockFate.LEASED
    await rig.receiver.recorder.wait_until(lambda: KEY in rig.receiver.recorder.arrived)
    assert rig.receiver.recorder.arrived[KEY] == (7,)
    assert rig.receiver.intake.prompt_timings(ATTEMPT) == measured
    rig.assert_blocks(KEY, OURS)
    stats = rig.receiver.connector.stats(ATTEMPT)
    assert stats is not None
    assert stats.num_bytes == 5 * BLOCK_BYTES
    assert rig.sender.recorder.released == [KEY]
    assert "lease_released" in rig.sender.recorder.names(KEY)
    assert rig.receiver.finish(decode, OURS, transferring=False) is BlockFate.FREE


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 8, 17, 20])
async def test_prompts_of_any_length_arrive_whole(rig: HandoffRig, num_tokens: int) -> None:
    num_blocks = -(-num_tokens // 4)
    rig.receiver.reserve(KEY, num_tokens, rig.sender.source, OURS[:num_blocks])
    rig.sender.finish(rig.sender.request(KEY, num_tokens), THEIRS[:num_blocks])
    await rig.receiver.recorder.wait_until(lambda: KEY in rig.receiver.recorder.arrived)
    rig.assert_blocks(KEY, OURS[:num_blocks])


async def test_full_blocks_are_read_while_the_prompt_is_computed(rig: HandoffRig) -> None:
    prefill = rig.sender.request(KEY, 18)
    rig.receiver.reserve(KEY, 18, rig.sender.source, OURS)
    rig.sender.compute(prefill, THEIRS, 6)
    await rig.sender.recorder.wait_until(lambda: ("read_progress", KEY, 1, "") in rig.sender.recorder.events)
    rig.sender.compute(prefill, THEIRS, 13)
    await rig.sender.recorder.wait_until(lambda: ("read_progress", KEY, 3, "") in rig.sender.recorder.events)
    assert "closing_offered" not in rig.sender.recorder.names(KEY)
    rig.sender.finish(prefill, THEIRS)
    await rig.receiver.recorder.wait_until(lambda: KEY in rig.receiver.recorder.arrived)
    started = [value for name, _, value, _ in rig.receiver.recorder.events if name == "read_started"]
    assert started == [1, 2, 2]
    rig.assert_blocks(KEY, OURS)


async def test_blocks_cached_at_the_receiver_are_not_read(rig: HandoffRig) -> None:
    rig.receiver.reserve(KEY, 18, rig.sender.source, OURS, num_local=8)
    rig.sender.finish(rig.sender.request(KEY, 18), THEIRS)
    await rig.receiver.recorder.wait_until(lambda: KEY in rig.receiver.recorder.arrived)
    rig.assert_blocks(KEY, OURS, first=2)


async def test_an_offer_waits_for_its_subscription(rig: HandoffRig) -> None:
    rig.sender.finish(rig.sender.request(KEY, 18), THEIRS)
    await rig.sender.recorder.wait_for_event("closing_offered", KEY)
    assert rig.sender.handoff.book.state(ATTEMPT) is LeaseState.GRANTED
    rig.receiver.reserve(KEY, 18, rig.sender.source, OURS)
    await rig.receiver.recorder.wait_until(lambda: KEY in rig.receiver.recorder.arrived)
    rig.assert_blocks(KEY, OURS)


async def test_a_hand_off_over_nixl_arrives_whole() -> None:
    # Incarnations name NIXL agents, so a test with two rigs would need other names.
    async with HandoffRig(make_backend=lambda incarnation, memory, recorder: NixlBackend(incarnation, memory)) as rig:
        prefill = rig.sender.request(KEY, 18)
        decode = rig.receiver.reserve(KEY, 18, rig.sender.source, OURS)
        rig.sender.compute(prefill, THEIRS, 9)
        await rig.sender.recorder.wait_for_event("read_progress", KEY)
        rig.sender.finish(prefill, THEIRS)
        await rig.receiver.recorder.wait_until(lambda: KEY in rig.receiver.recorder.arrived)
        rig.assert_blocks(KEY, OURS)
        assert rig.sender.recorder.released == [KEY]
        assert rig.receiver.finish(decode, OURS, transferring=False) is BlockFate.FREE


async def test_a_block_that_changed_since_it_was_computed_is_not_used(rig: HandoffRig) -> None:
    prefill = rig.sender.request(KEY, 18)
    rig.sender.finish(prefill, THEIRS)
    write_block(rig.sender.memory, THEIRS[3], b"\x01" * BLOCK_BYTES)
    rig.receiver.reserve(KEY, 18, rig.sender.source, OURS)
    await rig.receiver.recorder.wait_until(lambda: KEY in rig.receiver.recorder.failed)
    assert f"block {OURS[3]} is not what p0 computed" in rig.receiver.recorder.failed[KEY].detail
    assert KEY not in rig.receiver.recorder.arrived


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
        prefill = rig.sender.request(KEY, 18)
        rig.sender.finish(prefill, THEIRS)
        write_block(rig.sender.memory, THEIRS[damaged], b"\x01" * BLOCK_BYTES)
        rig.receiver.reserve(KEY, 18, rig.sender.source, OURS, num_local)
        await rig.receiver.recorder.wait_until(lambda: KEY in rig.receiver.recorder.failed)
        lost = rig.receiver.recorder.failed[KEY]
        assert lost.num_valid_blocks == lost_by_fake_connector(num_local, damaged).num_valid_blocks == damaged
        rig.assert_blocks(KEY, OURS[:damaged], first=num_local // 4)


@pytest.mark.parametrize("make_backend", [None, nixl_backend], ids=["memory", "nixl"])
async def test_blocks_that_were_confirmed_before_the_sender_was_lost_are_valid(
    make_backend: MakeBackend | None,
) -> None:
    async with HandoffRig(make_backend=make_backend, keeps_valid_blocks=True) as rig:
        prefill = rig.sender.request(KEY, 18)
        decode = rig.receiver.reserve(KEY, 18, rig.sender.source, OURS)
        rig.sender.compute(prefill, THEIRS, 6)
        await rig.receiver.recorder.wait_for_event("prefix_verified", KEY)
        rig.sender.compute(prefill, THEIRS, 13)
        await rig.receiver.recorder.wait_until(lambda: ("prefix_verified", KEY, 3, "") in rig.receiver.recorder.events)
        await rig.sender.server.stop(None)
        await rig.receiver.recorder.wait_until(lambda: KEY in rig.receiver.recorder.failed)
        lost = rig.receiver.recorder.failed[KEY]
        assert (lost.cause, lost.num_valid_blocks) == (TransferCause.PEER_GONE, 3)
        rig.assert_blocks(KEY, OURS[:3])
        rig.receiver.finish(decode, OURS, transferring=True)
        await rig.receiver.recorder.wait_until(lambda: rig.receiver.recorder.released == [KEY])
        rig.sender.finish(prefill, THEIRS)


async def test_blocks_of_a_read_in_flight_at_the_failure_are_not_valid() -> None:
    async with HandoffRig(keeps_valid_blocks=True) as rig:
        prefill = rig.sender.request(KEY, 18)
        decode = rig.receiver.reserve(KEY, 18, rig.sender.source, OURS)
        rig.sender.compute(prefill, THEIRS, 9)
        await rig.receiver.recorder.wait_for_event("prefix_verified", KEY)
        rig.freeze_reads()
        rig.sender.finish(prefill, THEIRS)
        await rig.receiver.recorder.wait_until(lambda: rig.receiver.recorder.reads_posted > 1)
        await rig.sender.server.stop(None)
        await rig.receiver.recorder.wait_until(lambda: KEY in rig.receiver.recorder.failed)
        assert rig.receiver.recorder.failed[KEY].num_valid_blocks == 2
        rig.receiver.finish(decode, OURS, transferring=True)
        rig.thaw_reads()
        await rig.receiver.recorder.wait_until(lambda: rig.receiver.recorder.released == [KEY])


@pytest.mark.parametrize("make_memory", [new_memory, new_device_memory], ids=["host", "device"])
async def test_a_sample_of_one_in_two_compares_every_second_block(make_memory: Callable[[], KVMemory]) -> None:
    async with HandoffRig(make_memory=make_memory, digest_every=2) as rig:
        damaged = {"a#1": 3, "b#1": 2, "b#1@1": 3, "c#1@1": 2}
        for number, (key, index) in enumerate(damaged.items()):
            ours, theirs = ([5 * number + start + i for i in range(5)] for start in (1, 101))
            rig.sender.finish(rig.sender.request(key, 18), theirs)
            write_block(rig.sender.memory, theirs[index], b"\x01" * BLOCK_BYTES)
            rig.receiver.reserve(key, 18, rig.sender.source, ours)
        recorder = rig.receiver.recorder
        await recorder.wait_until(lambda: len(recorder.arrived) + len(recorder.failed) == len(damaged))
        assert set(recorder.arrived) == {"a#1", "c#1@1"}
        assert all("is not what p0 computed" in lost.detail for lost in recorder.failed.values())


async def test_a_prompt_arrives_only_once_its_digests_are_computed(rig: HandoffRig) -> None:
    await rig.join()
    gate = rig.receiver.digests.gate
    gate.clear()
    rig.receiver.reserve(KEY, 18, rig.sender.source, OURS)
    rig.sender.finish(rig.sender.request(KEY, 18), THEIRS)
    await rig.sender.recorder.wait_until(lambda: rig.sender.recorder.has_confirm_read)
    await rig.sender.recorder.wait_until(lambda: rig.sender.recorder.released == [KEY])
    await _wait_until_settled(rig)
    assert rig.receiver.intake.book.state(ATTEMPT) is TransferState.CONFIRMING
    gate.set()
    await rig.receiver.recorder.wait_until(lambda: KEY in rig.receiver.recorder.arrived)
    rig.assert_blocks(KEY, OURS)


async def test_a_bit_flipped_by_a_read_is_detected() -> None:
    fabric = FakeTransferFabric()

    def make_backend(incarnation: str, memory: KVMemory, recorder: Recorder) -> TransferBackend:
        return FaultyTransferBackend(AnnouncingBackend(fabric, incarnation, memory, recorder), Faults(corrupt=1.0))

    async with HandoffRig(make_backend=make_backend) as rig:
        rig.receiver.reserve(KEY, 18, rig.sender.source, OURS)
        rig.sender.finish(rig.sender.request(KEY, 18), THEIRS)
        await rig.receiver.recorder.wait_until(lambda: KEY in rig.receiver.recorder.failed)
        assert "is not what p0 computed" in rig.receiver.recorder.failed[KEY].detail
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
        rig.receiver.reserve(key, 18, rig.sender.source, ours[key])
        prefill = rig.sender.request(key, 18)
        rig.sender.compute(prefill, theirs[key], 9)
        rig.sender.finish(prefill, theirs[key])
    await rig.receiver.recorder.wait_until(lambda: len(rig.receiver.recorder.arrived) == len(keys))
    assert rig.sender.handoff.num_links == 1
    for key in keys:
        rig.assert_blocks(key, ours[key])


async def test_a_request_that_ended_with_its_first_token_still_brings_valid_blocks(rig: HandoffRig) -> None:
    # The engine puts arrived blocks into its prefix cache: unread ones would poison it.
    rig.receiver.reserve(KEY, 18, rig.sender.source, OURS)
    rig.sender.finish(rig.sender.request(KEY, 18), THEIRS, Outcome.STOP)
    await rig.receiver.recorder.wait_until(lambda: KEY in rig.receiver.recorder.arrived)
    rig.assert_blocks(KEY, OURS)


# Aborted by the receiver.


async def test_an_abort_by_the_receiver_while_the_link_opens_frees_its_blocks(rig: HandoffRig) -> None:
    decode = rig.receiver.reserve(KEY, 18, rig.sender.source, OURS)
    assert rig.receiver.finish(decode, OURS, transferring=True) is BlockFate.QUARANTINED
    await rig.receiver.recorder.wait_until(lambda: rig.receiver.recorder.released == [KEY])
    assert rig.receiver.intake.book.state(ATTEMPT) is None


async def test_an_abort_by_the_receiver_before_any_offer_frees_both_sides(rig: HandoffRig) -> None:
    decode = rig.receiver.reserve(KEY, 18, rig.sender.source, OURS)
    await rig.receiver.recorder.wait_for_event("subscribed", KEY)
    assert rig.receiver.finish(decode, OURS, transferring=True) is BlockFate.QUARANTINED
    await rig.receiver.recorder.wait_until(lambda: rig.receiver.recorder.released == [KEY])
    # What is computed later is not kept for a reader that said no.
    await _wait_until_settled(rig)
    rig.sender.finish(rig.sender.request(KEY, 18), THEIRS)
    await rig.sender.recorder.wait_until(lambda: rig.sender.recorder.released == [KEY])


async def test_both_sides_list_a_hand_off_that_is_under_way(rig: HandoffRig) -> None:
    await rig.join()
    rig.freeze_reads()
    prefill = rig.sender.request(KEY, 18)
    decode = rig.receiver.reserve(KEY, 18, rig.sender.source, OURS)
    rig.sender.finish(prefill, THEIRS)
    await rig.wait_for_read()
    (lease,), (transfer,) = rig.sender.handoff.report().open, rig.receiver.intake.report().open
    assert (lease.attempt, lease.state, lease.peer_incarnation, lease.num_blocks) == (ATTEMPT, "READING", "d0.first", 5)
    assert (transfer.attempt, transfer.state, transfer.peer, transfer.num_blocks) == (ATTEMPT, "READING", "p0", 5)
    rig.receiver.finish(decode, OURS, transferring=True)
    await rig.receiver.recorder.wait_for_event("quarantined", KEY)
    (quarantined,) = rig.receiver.intake.report().open
    assert (quarantined.state, quarantined.num_blocks) == ("QUARANTINED", 5)
    rig.thaw_reads()
    await rig.sender.recorder.wait_until(lambda: rig.sender.recorder.released == [KEY])
    assert not rig.sender.handoff.report().open
    assert not rig.receiver.intake.report().open


async def test_an_abort_by_the_receiver_during_a_read_keeps_both_sides_blocks_until_it_ends(rig: HandoffRig) -> None:
    await rig.join()
    rig.freeze_reads()
    decode = rig.receiver.reserve(KEY, 18, rig.sender.source, OURS)
    rig.sender.finish(rig.sender.request(KEY, 18), THEIRS)
    await rig.wait_for_read()
    assert rig.receiver.finish(decode, OURS, transferring=True) is BlockFate.QUARANTINED
    await rig.sender.recorder.wait_for_event("lease_suspect", KEY)
    assert rig.receiver.intake.counts().quarantined_blocks == 5
    assert not rig.receiver.recorder.released
    assert not rig.sender.recorder.released
    rig.thaw_reads()
    await rig.receiver.recorder.wait_until(lambda: rig.receiver.recorder.released == [KEY])
    await rig.sender.recorder.wait_until(lambda: rig.sender.recorder.released == [KEY])
    assert KEY not in rig.receiver.recorder.arrived


# Aborted by the sender.


async def test_an_abort_by_the_sender_before_computing_fails_the_transfer(rig: HandoffRig) -> None:
    rig.receiver.reserve(KEY, 18, rig.sender.source, OURS)
    await rig.receiver.recorder.wait_for_event("subscribed", KEY)
    await _wait_until_settled(rig)
    assert rig.sender.finish(rig.sender.request(KEY, 18), [], Outcome.ABORTED) is BlockFate.FREE
    await rig.receiver.recorder.wait_until(lambda: KEY in rig.receiver.recorder.failed)
    assert rig.receiver.recorder.failed[KEY].cause is TransferCause.CANCELLED


async def test_an_abort_by_the_sender_without_a_reader_releases_its_blocks(rig: HandoffRig) -> None:
    prefill = rig.sender.request(KEY, 18)
    rig.sender.compute(prefill, THEIRS, 9)
    assert rig.sender.finish(prefill, THEIRS, Outcome.ABORTED) is BlockFate.LEASED
    await rig.sender.recorder.wait_until(lambda: rig.sender.recorder.released == [KEY])
    rig.receiver.reserve(KEY, 18, rig.sender.source, OURS)
    await rig.receiver.recorder.wait_until(lambda: KEY in rig.receiver.recorder.failed)


async def test_an_abort_by_the_sender_during_a_read_keeps_its_blocks_until_it_ends(rig: HandoffRig) -> None:
    await rig.join()
    rig.freeze_reads()
    prefill = rig.sender.request(KEY, 18)
    decode = rig.receiver.reserve(KEY, 18, rig.sender.source, OURS)
    rig.sender.compute(prefill, THEIRS, 9)
    await rig.wait_for_read()
    assert rig.sender.finish(prefill, THEIRS, Outcome.ABORTED) is BlockFate.LEASED
    await rig.receiver.recorder.wait_until(lambda: KEY in rig.receiver.recorder.failed)
    assert rig.receiver.finish(decode, OURS, transferring=True) is BlockFate.QUARANTINED
    assert rig.sender.handoff.book.state(ATTEMPT) is LeaseState.SUSPECT
    assert not rig.sender.recorder.released
    rig.thaw_reads()
    await rig.receiver.recorder.wait_until(lambda: rig.receiver.recorder.released == [KEY])
    await rig.sender.recorder.wait_until(lambda: rig.sender.recorder.released == [KEY])


async def test_an_unclaimed_offer_is_released_when_the_router_withdraws_it(rig: HandoffRig) -> None:
    rig.sender.finish(rig.sender.request(KEY, 18), THEIRS)
    await rig.sender.recorder.wait_for_event("closing_offered", KEY)
    rig.sender.handoff.withdraw(ATTEMPT, "aborted by the router")
    assert rig.sender.recorder.released == [KEY]


# Leases that end.


async def test_blocks_of_an_expired_lease_are_not_read(rig: HandoffRig) -> None:
    rig.sender.finish(rig.sender.request(KEY, 18), THEIRS)
    await rig.sender.recorder.wait_for_event("closing_offered", KEY)
    rig.clock.advance(LeaseTimes().unclaimed_s + 1)
    rig.sender.handoff.tick()
    assert rig.sender.recorder.released == [KEY]
    rig.receiver.reserve(KEY, 18, rig.sender.source, OURS)
    await rig.receiver.recorder.wait_until(lambda: KEY in rig.receiver.recorder.failed)
    assert KEY not in rig.receiver.recorder.arrived
    assert rig.receiver.recorder.names(KEY).count("read_started") == 0


async def test_blocks_reused_under_a_read_are_never_delivered(rig: HandoffRig) -> None:
    # The sender's engine took the blocks back (preemption) while they were read, and finished from others.
    prefill = rig.sender.request(KEY, 18)
    rig.receiver.reserve(KEY, 18, rig.sender.source, OURS)
    rig.sender.compute(prefill, THEIRS, 9)
    await rig.sender.recorder.wait_for_event("read_progress", KEY)
    prefill.num_preemptions += 1
    rig.sender.finish(prefill, THEIRS)
    await rig.receiver.recorder.wait_until(lambda: KEY in rig.receiver.recorder.failed)
    await rig.sender.recorder.wait_until(lambda: rig.sender.recorder.released == [KEY])
    assert KEY not in rig.receiver.recorder.arrived


async def test_heartbeats_keep_a_lease_and_silence_ends_it(rig: HandoffRig) -> None:
    await rig.join()
    rig.freeze_reads()
    rig.receiver.reserve(KEY, 18, rig.sender.source, OURS)
    rig.sender.finish(rig.sender.request(KEY, 18), THEIRS)
    await rig.wait_for_read()
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
    await rig.sender.recorder.wait_until(lambda: rig.sender.recorder.released == [KEY])


# Links that end, and peers that are gone.


async def test_a_cut_link_fails_the_transfer_and_frees_both_sides(rig: HandoffRig) -> None:
    decode = rig.receiver.reserve(KEY, 18, rig.sender.source, OURS)
    prefill = rig.sender.request(KEY, 18)
    rig.sender.compute(prefill, THEIRS, 9)
    await rig.sender.recorder.wait_for_event("read_progress", KEY)
    await rig.sender.server.stop(None)
    await rig.receiver.recorder.wait_until(lambda: KEY in rig.receiver.recorder.failed)
    assert rig.receiver.recorder.failed[KEY].cause is TransferCause.PEER_GONE
    rig.receiver.finish(decode, OURS, transferring=True)
    await rig.receiver.recorder.wait_until(lambda: rig.receiver.recorder.released == [KEY])
    rig.sender.finish(prefill, THEIRS)
    await rig.sender.recorder.wait_for_event("lease_suspect", KEY)
    await _wait_until_settled(rig)
    assert not rig.sender.recorder.released
    rig.clock.advance(LeaseTimes().grace_s + 1)
    rig.sender.handoff.tick()
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
    await rig.join()
    rig.freeze_reads()
    decode = rig.receiver.reserve(KEY, 18, rig.sender.source, OURS)
    rig.sender.finish(rig.sender.request(KEY, 18), THEIRS)
    await rig.wait_for_read()
    await rig.sender.server.stop(None)
    await rig.receiver.recorder.wait_until(lambda: KEY in rig.receiver.recorder.failed)
    rig.receiver.finish(decode, OURS, transferring=True)
    await _wait_until_settled(rig)
    assert rig.receiver.intake.book.state(ATTEMPT) is TransferState.QUARANTINED
    assert not rig.receiver.recorder.released
    rig.thaw_reads()
    await rig.receiver.recorder.wait_until(lambda: rig.receiver.recorder.released == [KEY])


async def test_after_a_cut_the_next_request_opens_a_new_link_to_memory_that_stayed_connected(rig: HandoffRig) -> None:
    rig.receiver.reserve("a#1", 18, rig.sender.source, OURS)
    await rig.receiver.recorder.wait_for_event("subscribed", "a#1")
    # The reader may have its welcome before the sender has the link.
    await rig.sender.recorder.wait_until(lambda: rig.sender.recorder.heartbeats > 0)
    rig.sender.handoff._links.cut(1, "test")
    await rig.receiver.recorder.wait_until(lambda: "a#1" in rig.receiver.recorder.failed)
    rig.receiver.reserve(KEY, 18, rig.sender.source, OURS)
    rig.sender.finish(rig.sender.request(KEY, 18), THEIRS)
    await rig.receiver.recorder.wait_until(lambda: KEY in rig.receiver.recorder.arrived)
    rig.assert_blocks(KEY, OURS)
    assert not rig.receiver.recorder.dropped_peers


async def test_a_sender_that_is_gone_is_dropped_with_its_memory(rig: HandoffRig) -> None:
    rig.receiver.reserve(KEY, 18, rig.sender.source, OURS)
    await rig.receiver.recorder.wait_for_event("subscribed", KEY)
    await rig.sender.stop()
    await rig.receiver.recorder.wait_until(lambda: rig.receiver.recorder.dropped_peers == ["p0.first"])
    assert rig.receiver.recorder.failed[KEY].cause is TransferCause.PEER_GONE


async def test_a_restarted_sender_replaces_its_predecessor() -> None:
    async with HandoffRig() as rig:
        rig.receiver.reserve("a#1", 18, rig.sender.source, OURS)
        await rig.receiver.recorder.wait_for_event("subscribed", "a#1")
        # It still listens, so that nothing but its successor tells that it is no more.
        rig.sender.handoff._links.close()
        await rig.receiver.recorder.wait_until(lambda: "a#1" in rig.receiver.recorder.failed)
        successor = SenderHalf(rig.make_backend, LinkIdentity("c", "p0", "p0.second", LAYOUT), rig.clock)
        await successor.start()
        rig.receiver.reserve(KEY, 18, successor.source, OURS)
        successor.finish(successor.request(KEY, 18), THEIRS)
        await rig.receiver.recorder.wait_until(lambda: KEY in rig.receiver.recorder.arrived)
        assert rig.receiver.recorder.dropped_peers == ["p0.first"]
        await successor.stop()


async def test_heartbeats_keep_an_idle_link(rig: HandoffRig) -> None:
    # However long no offer comes: a request that is queued on a living sender is not lost.
    rig.receiver.reserve(KEY, 18, rig.sender.source, OURS)
    await rig.sender.recorder.wait_until(lambda: rig.sender.recorder.heartbeats > 3 * MISSED_HEARTBEATS)
    assert not rig.receiver.recorder.failed
    rig.sender.finish(rig.sender.request(KEY, 18), THEIRS)
    await rig.receiver.recorder.wait_until(lambda: KEY in rig.receiver.recorder.arrived)


async def test_an_agent_that_dies_under_a_read_fails_it(rig: HandoffRig) -> None:
    await rig.join()
    rig.freeze_reads()
    decode = rig.receiver.reserve(KEY, 18, rig.sender.source, OURS)
    rig.sender.finish(rig.sender.request(KEY, 18), THEIRS)
    await rig.wait_for_read()
    rig.fabric.kill(rig.sender.identity.incarnation)
    await rig.receiver.recorder.wait_until(lambda: KEY in rig.receiver.recorder.failed)
    rig.receiver.finish(decode, OURS, transferring=True)
    await rig.receiver.recorder.wait_until(lambda: rig.receiver.recorder.released == [KEY])


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
        reader.reserve(KEY, 18, rig.sender.source, OURS)
        rig.sender.finish(rig.sender.request(KEY, 18), THEIRS)
        await reader.recorder.wait_until(lambda: reader.recorder.reads_posted > 0)
        await reader.stop()
        await rig.sender.recorder.wait_for_event("lease_suspect", KEY)
        if listens:
            rig.clock.advance(LeaseTimes().grace_s + 1)
            rig.sender.handoff.tick()
        await rig.sender.recorder.wait_until(lambda: rig.sender.recorder.released == [KEY])
        (why,) = [detail for name, _, _, detail in rig.sender.recorder.events if name == "lease_released"]
        assert why == ("grace over" if listens else "reader gone")
        other.close()


async def test_a_transfer_from_an_address_where_nobody_listens_fails(rig: HandoffRig) -> None:
    rig.receiver.reserve(KEY, 18, replace(rig.sender.source, address="127.0.0.1:1"), OURS)
    await rig.receiver.recorder.wait_until(lambda: KEY in rig.receiver.recorder.failed)
    assert rig.receiver.recorder.failed[KEY].cause is TransferCause.PEER_GONE


async def test_a_restarted_reader_ends_its_predecessor(rig: HandoffRig) -> None:
    await rig.join()
    rig.freeze_reads()
    rig.receiver.reserve(KEY, 18, rig.sender.source, OURS)
    rig.sender.finish(rig.sender.request(KEY, 18), THEIRS)
    await rig.wait_for_read()
    identity = LinkIdentity("c", "d0", "d0.second", LAYOUT)
    successor = ReceiverHalf(rig.make_backend, identity)
    await successor.start()
    successor.reserve("other#1", 18, rig.sender.source, OURS)
    await rig.sender.recorder.wait_until(lambda: rig.sender.recorder.released == [KEY])
    await rig.receiver.recorder.wait_until(lambda: KEY in rig.receiver.recorder.failed)
    await successor.stop()
    rig.thaw_reads()


# Refusals.


async def test_a_stale_incarnation_is_refused(rig: HandoffRig) -> None:
    rig.receiver.reserve(KEY, 18, replace(rig.sender.source, incarnation="p0.old"), OURS)
    await rig.receiver.recorder.wait_until(lambda: KEY in rig.receiver.recorder.failed)
    assert rig.receiver.recorder.failed[KEY].cause is TransferCause.PEER_GONE
    assert "p0.first, not p0.old" in rig.receiver.recorder.failed[KEY].detail


async def test_layouts_that_differ_are_refused_with_both_printed() -> None:
    other = replace(LAYOUT, numerics="cuda-7", block_size=8)
    async with HandoffRig(receiver_layout=other) as rig:
        rig.receiver.reserve(KEY, 18, rig.sender.source, OURS)
        await rig.receiver.recorder.wait_until(lambda: KEY in rig.receiver.recorder.failed)
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


async def test_another_cluster_is_refused() -> None:
    async with HandoffRig(cluster="elsewhere") as rig:
        rig.receiver.reserve(KEY, 18, rig.sender.source, OURS)
        await rig.receiver.recorder.wait_until(lambda: KEY in rig.receiver.recorder.failed)
        assert rig.receiver.recorder.failed[KEY].cause is TransferCause.REFUSED


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


async def _misbehaving_source(rig: HandoffRig, answers: Callable[[Any], list[SenderMessage]]) -> tuple[Peer, Any]:
    server = grpc.aio.server()
    kv_link_pb2_grpc.add_KvLinkServicer_to_server(MisbehavingSender(rig, answers), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return Peer("p0", "p0.first", f"127.0.0.1:{port}"), server


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
    def answers(request: kv_link_pb2.OpenRequest) -> list[SenderMessage]:
        return [offer] if request.HasField("subscribe") else []

    rig.receiver.recorder.is_peer_running = True
    source, server = await _misbehaving_source(rig, answers)
    rig.receiver.reserve(KEY, 18, source, OURS)
    await rig.receiver.recorder.wait_until(lambda: KEY in rig.receiver.recorder.failed)
    assert rig.receiver.recorder.failed[KEY].cause is TransferCause.REFUSED
    assert "read_started" not in rig.receiver.recorder.names(KEY)
    await server.stop(None)


@pytest.mark.parametrize(
    ("num_others", "cause"), [(MAX_PARTS, TransferCause.REFUSED), (1, TransferCause.LAYOUT_MISMATCH)]
)
async def test_a_sender_whose_memories_can_not_be_used_is_refused(
    rig: HandoffRig, monkeypatch: pytest.MonkeyPatch, num_others: int, cause: TransferCause
) -> None:
    monkeypatch.setattr(MisbehavingSender, "other_parts", [MemoryPart(range(1), b"x", 1, "DRAM", 0)] * num_others)
    rig.receiver.recorder.is_peer_running = True
    source, server = await _misbehaving_source(rig, lambda request: [])
    rig.receiver.reserve(KEY, 18, source, OURS)
    await rig.receiver.recorder.wait_until(lambda: KEY in rig.receiver.recorder.failed)
    assert rig.receiver.recorder.failed[KEY].cause is cause
    await server.stop(None)


async def test_a_silent_sender_is_declared_lost(rig: HandoffRig) -> None:
    source, server = await _misbehaving_source(rig, lambda request: [])
    rig.receiver.reserve(KEY, 18, source, OURS)
    await rig.receiver.recorder.wait_until(lambda: KEY in rig.receiver.recorder.failed)
    assert "no heartbeat" in rig.receiver.recorder.failed[KEY].detail
    await server.stop(None)


async def test_a_silent_sender_whose_process_runs_is_spared_for_a_while(rig: HandoffRig) -> None:
    source, server = await _misbehaving_source(rig, lambda request: [])
    rig.receiver.recorder.is_peer_running = True
    rig.receiver.reserve(KEY, 18, source, OURS)
    await rig.receiver.recorder.wait_until(lambda: KEY in rig.receiver.recorder.failed)
    assert rig.receiver.recorder.probed_addresses == [source.address] * (MAX_SPARED + 1)
    await server.stop(None)


async def test_a_silent_sender_whose_process_runs_is_lost_with_its_link_and_has_failed_no_probe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(MisbehavingSender, "answers_probes", False)
    # The link is lost later than a probe of which nothing is heard.
    times = ProbeTimes(tick_s=HEARTBEAT_S, max_quiet_ticks=2 * MISSED_HEARTBEATS)
    async with HandoffRig(probe_times=times) as rig:
        source, server = await _misbehaving_source(rig, lambda request: [])
        rig.receiver.recorder.is_peer_running = True
        rig.receiver.intake.expect(ATTEMPT, source)
        await rig.receiver.recorder.wait_until(lambda: KEY in rig.receiver.recorder.failed)
        assert rig.receiver.recorder.failed[KEY].cause is TransferCause.PEER_GONE
        assert not rig.receiver.intake.probes.outcomes
        await server.stop(None)


async def test_a_silent_reader_whose_process_runs_keeps_its_lease(rig: HandoffRig) -> None:
    rig.sender.recorder.is_peer_running = True
    rig.sender.finish(rig.sender.request(KEY, 18), THEIRS)
    async with grpc.aio.insecure_channel(rig.sender.source.address) as channel:
        call = kv_link_pb2_grpc.KvLinkStub(channel).Open()
        hello = LinkHello(PROTOCOL_VERSION, "c", "d9", "d9.first", "p0.first", LAYOUT, "somewhere:9")
        await call.write(write_hello(hello))
        await call.write(write_reader_message(Subscribe(ATTEMPT, 0)))
        await rig.sender.recorder.wait_until(lambda: rig.sender.handoff.book.state(ATTEMPT) is LeaseState.READING)
        for _ in range(3):
            rig.clock.advance(LeaseTimes().lease_s - 1)
            await _wait_for_heartbeat(rig)
            rig.sender.handoff.tick()
        assert rig.sender.handoff.book.state(ATTEMPT) is LeaseState.READING
        assert set(rig.sender.recorder.probed_addresses) == {"somewhere:9"}
        rig.sender.recorder.is_peer_running = False
        await rig.sender.recorder.wait_for_event("lease_suspect", KEY)
        call.cancel()


async def test_kv_is_not_used_when_the_sender_denies_the_lease_although_all_bytes_arrived(rig: HandoffRig) -> None:
    def answers(request: kv_link_pb2.OpenRequest) -> list[SenderMessage]:
        if request.HasField("subscribe"):
            return [Offer(ATTEMPT, 0, (1, 2, 3, 4, 5), 1000, Closing(18, (7,), False))]
        if request.HasField("confirm_read"):
            return [ReadConfirmed(ATTEMPT, False)]
        return []

    rig.receiver.recorder.is_peer_running = True
    source, server = await _misbehaving_source(rig, answers)
    rig.receiver.reserve(KEY, 18, source, OURS)
    await rig.receiver.recorder.wait_until(lambda: KEY in rig.receiver.recorder.failed)
    assert rig.receiver.recorder.failed[KEY].cause is TransferCause.LEASE_LOST
    assert "read_done" in rig.receiver.recorder.names(KEY)
    assert KEY not in rig.receiver.recorder.arrived
    await server.stop(None)


async def test_a_silent_reader_loses_its_link_and_its_lease(rig: HandoffRig) -> None:
    rig.sender.finish(rig.sender.request(KEY, 18), THEIRS)
    async with grpc.aio.insecure_channel(rig.sender.source.address) as channel:
        call = kv_link_pb2_grpc.KvLinkStub(channel).Open()
        hello = LinkHello(PROTOCOL_VERSION, "c", "d9", "d9.first", "p0.first", LAYOUT)
        await call.write(write_hello(hello))
        await call.write(write_reader_message(Subscribe(ATTEMPT, 0)))
        # Somebody else's lease is none of its business, and nonsense is skipped.
        await call.write(write_reader_message(ConfirmRead(AttemptKey("other", 1))))
        await call.write(kv_link_pb2.OpenRequest())
        seen: list[str | None] = []
        rig.sender.recorder.is_peer_running = True
        await _read_until(call, seen, "read_confirmed")
        rig.sender.recorder.is_peer_running = False
        with pytest.raises(grpc.aio.AioRpcError) as lost:
            await _read_until(call, seen)
        assert "no heartbeat" in str(lost.value.details())
        assert [name for name in seen if name != "heartbeat"] == ["welcome", "offer", "read_confirmed"]
    await rig.sender.recorder.wait_for_event("lease_suspect", KEY)
    rig.clock.advance(LeaseTimes().grace_s + 1)
    rig.sender.handoff.tick()
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
    request = rig.receiver.reserve(marker, 4, rig.sender.source, [0])
    # The sender may have welcomed the receiver and not have its link yet: its answer says that it has.
    rig.sender.handoff.withdraw(attempt_of(marker), "marker")
    await rig.receiver.recorder.wait_until(lambda: marker in rig.receiver.recorder.failed)
    rig.receiver.finish(request, [0], transferring=True)
    await rig.receiver.recorder.wait_until(lambda: marker in rig.receiver.recorder.released)
    rig.receiver.recorder.released.remove(marker)
