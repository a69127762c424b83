"""KV events: a reader that applies all of them knows the prefix cache, and a reader that missed some is told so."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from baton.engine.kv_cache.block_hash import BlockHasher, CacheKeyFields
from baton.engine.kv_cache.events import KVEventLog
from baton.engine.scheduler import Scheduler
from baton.messages.kv_cache import AllBlocksCleared, BlockRemoved, BlockStored, Tier
from baton.messages.spans import EncoderContent, Span, rows_key
from tests.support.engine_rig import EngineRig, prompt_of


@dataclass
class Follower:
    """A reader that keeps a copy of the prefix cache's index."""

    scheduler: Scheduler
    found: dict[Tier, set[bytes]] = field(default_factory=dict)
    sequence: int = -1
    num_snapshots: int = 0

    def catch_up(self) -> None:
        batch = self.scheduler.kv_cache_manager.kv_events.since(self.sequence)
        if not batch.complete:
            snapshot = self.scheduler.kv_snapshot()
            self.found = {tier: set(keys) for tier, keys in snapshot.block_hashes.items()}
            self.sequence = snapshot.next_sequence
            self.num_snapshots += 1
            return
        for event in batch.events:
            match event:
                case BlockStored(block_hashes, tier=tier):
                    self.found.setdefault(tier, set()).update(block_hashes)
                case BlockRemoved(block_hashes, tier):
                    self.found[tier].difference_update(block_hashes)
                case AllBlocksCleared():
                    self.found = {tier: keys for tier, keys in self.found.items() if tier == "encoder"}
        self.sequence = batch.next_sequence

    def check(self) -> None:
        manager = self.scheduler.kv_cache_manager
        assert self.found.get("device", set()) == set(manager.pool.keys)
        assert manager.host is not None
        assert self.found.get("host", set()) == set(manager.host.pool.keys)


def test_no_event_is_recorded_without_a_reader(rig: EngineRig) -> None:
    rig.complete("r", 20, max_tokens=2)
    assert rig.scheduler.kv_cache_manager.kv_events.since(0).complete is False
    assert rig.scheduler.kv_cache_manager.kv_events.next_sequence == 0
    snapshot = rig.scheduler.kv_snapshot()
    assert len(snapshot.block_hashes["device"]) == 5
    assert rig.scheduler.kv_cache_manager.kv_events.since(snapshot.next_sequence).events == []


def test_stored_blocks_come_with_parent_and_tokens() -> None:
    rig = EngineRig(max_num_batched_tokens=8)
    start = rig.scheduler.kv_snapshot().next_sequence
    request = rig.complete("r", 17, max_tokens=1)
    hasher = BlockHasher(CacheKeyFields.of(rig.runner.model, rig.runner.layout), 4)
    keys: list[bytes] = []
    hasher.extend(keys, hasher.root(), request.prompt_token_ids)
    tokens = request.prompt_token_ids
    batch = rig.scheduler.kv_cache_manager.kv_events.since(start)
    assert batch.events == [
        BlockStored(keys[:2], None, tokens[:8]),
        BlockStored(keys[2:4], keys[1], tokens[8:16]),
    ]
    assert rig.scheduler.kv_cache_manager.kv_events.since(batch.next_sequence).events == []
    assert rig.scheduler.kv_cache_manager.kv_events.since(start + 1).events == batch.events[1:]


def test_evictions_and_a_reset_are_events() -> None:
    rig = EngineRig(num_blocks=6)
    rig.complete("first", prompt_of(16, 1), max_tokens=1)
    start = rig.scheduler.kv_snapshot()
    rig.complete("second", prompt_of(16, 2), max_tokens=1)
    removed, stored = rig.scheduler.kv_cache_manager.kv_events.since(start.next_sequence).events
    assert isinstance(removed, BlockRemoved)
    assert set(removed.block_hashes) < start.block_hashes["device"]
    assert isinstance(stored, BlockStored)
    assert rig.scheduler.kv_cache_manager.reset_prefix_cache()
    assert rig.scheduler.kv_cache_manager.kv_events.since(start.next_sequence).events[2:] == [AllBlocksCleared()]


def test_a_reader_that_missed_events_gets_an_incomplete_batch() -> None:
    log = KVEventLog(capacity=3)
    log.is_recording = True
    for number in range(3):
        log.record(BlockStored([bytes([number])]))
    log.record(BlockRemoved([b"x", b"y"]))
    assert log.since(1).complete is False
    assert log.since(1).events == ()
    assert [len(event.block_hashes) for event in log.since(2).events] == [1, 2]
    assert log.since(4).complete
    assert log.since(5).complete is False, "it never was that far: another incarnation's number"


def test_a_stopped_and_restarted_log_is_a_gap_for_readers() -> None:
    log = KVEventLog()
    log.is_recording = True
    log.record(BlockStored([b"a"]))
    log.stop()
    log.record(BlockStored([b"b"]))
    assert log.since(1).complete is False
    log.is_recording = True
    assert log.since(1).complete is False
    assert log.since(log.next_sequence).complete


@given(
    requests=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 20), st.integers(1, 3)), max_size=20),
    reads=st.lists(st.booleans(), min_size=20, max_size=20),
    capacity=st.sampled_from([3, 1000]),
    num_host_blocks=st.sampled_from([2, 5, 20]),
)
def test_a_reader_that_applies_all_events_knows_the_cache(
    requests: list[tuple[int, int, int]], reads: list[bool], capacity: int, num_host_blocks: int
) -> None:
    rig = EngineRig(num_blocks=9, max_model_len=30, num_host_blocks=num_host_blocks)
    rig.scheduler.kv_cache_manager.kv_events = KVEventLog(capacity)
    follower = Follower(rig.scheduler)
    for number, ((family, length, max_tokens), read) in enumerate(zip(requests, reads, strict=False)):
        rig.complete(f"r{number}", prompt_of(length, family), max_tokens=max_tokens)
        if number % 7 == 6:
            rig.scheduler.kv_cache_manager.reset_prefix_cache()
        if read:
            follower.catch_up()
            follower.check()
    assert follower.num_snapshots <= 1 or capacity == 3


def test_events_that_the_only_reader_has_are_dropped() -> None:
    log = KVEventLog()
    log.is_recording = True
    for number in range(5):
        log.record(BlockStored([bytes([number])]))
    log.forget_before(3)
    assert [event.block_hashes for event in log.since(3).events] == [[b"\x03"], [b"\x04"]]
    assert not log.since(2).complete
    log.forget_before(5)
    assert log.since(5).complete
    assert log.since(5).events == []
    log.record(BlockRemoved([b"\x03"]))
    assert [event.block_hashes for event in log.since(5).events] == [[b"\x03"]]


def test_events_tell_of_rows_that_come_and_go() -> None:
    rig = EngineRig(num_encoder_rows=4)
    first, second = (EncoderContent.of(text) for text in (b"a", b"b"))
    rig.complete("before", 8, spans=[Span(0, 4, first.digest, is_encoded=True)], max_tokens=1)
    follower = Follower(rig.scheduler)
    follower.catch_up()
    assert follower.found["encoder"] == {rows_key(first.digest)}
    assert follower.found["device"]
    rig.scheduler.kv_cache_manager.reset_prefix_cache()
    rig.complete("after", 8, spans=[Span(0, 4, second.digest, is_encoded=True)], max_tokens=1)
    follower.catch_up()
    assert follower.found["encoder"] == {rows_key(second.digest)}
    assert follower.num_snapshots == 1
