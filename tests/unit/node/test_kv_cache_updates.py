"""Updates about a node's prefix cache: a router that applies them knows what the node has."""

from __future__ import annotations

from random import Random

import pytest

from baton.engine.kv_cache.block_hash import CacheKeyFields
from baton.engine.kv_cache.events import KVEventBatch, KVEventLog, KVSnapshot
from baton.engine.scheduler import Scheduler, SchedulerConfig
from baton.messages.ids import AttemptKey
from baton.messages.kv_cache import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheUpdate, Tier
from baton.messages.node import Leg, Submit, WatchKVCache
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams
from baton.node.driver import StepNews
from baton.node.reports.logs import EventLog
from baton.node.reports.reports import kv_cache_updates
from baton.node.router_streams import Port
from baton.node.service import NodeService
from tests.doubles.fake_clock import FakeClock
from tests.doubles.fake_engine_driver import FakeEngineDriver
from tests.doubles.fake_role import FakeRole
from tests.doubles.fake_runner import FakeRunner
from tests.support.engine_rig import prompt_of
from tests.support.router_parts import decode


class Rig:
    """A node without gRPC, with so few blocks that its prefix cache evicts some."""

    def __init__(self) -> None:
        runner = FakeRunner(13, 4, num_host_blocks=5)
        limits = SchedulerConfig(13, block_size=4, num_host_blocks=5, max_model_len=48)
        fields = CacheKeyFields.of(runner.model, runner.layout)
        role, clock = FakeRole(), FakeClock()
        self.scheduler = Scheduler(limits, fields, clock, role.connector)
        self.late_news: list[StepNews] | None = None
        """The news that the event loop, while it is busy, has not handled yet."""
        self.driver = FakeEngineDriver(self.scheduler, runner, self._publish, lambda error: None)
        description = decode(block_size=4, max_model_len=48, num_blocks=12, vocab_size=1000)
        self.service = NodeService(description, role, self.driver, EventLog(), clock, lambda: None)
        self._number = 0

    def _publish(self, news: StepNews) -> None:
        if self.late_news is None:
            self.service.on_step(news)
        else:
            self.late_news.append(news)

    def router(self) -> Router:
        return Router(self.service.open_port("router"))

    def work(self, router: Router, prompt: list[int]) -> None:
        """Run a request to its end."""
        self._number += 1
        key = AttemptKey(f"r{self._number}", 1)
        router.port.receive(Submit(key, Leg.WHOLE, RequestSpec(prompt, SamplingParams(max_tokens=2))))
        self.driver.run()

    @property
    def log(self) -> KVEventLog:
        return self.scheduler.kv_cache_manager.kv_events

    def cached(self) -> dict[Tier, set[bytes]]:
        """The cached blocks, read from the pools themselves."""
        manager = self.scheduler.kv_cache_manager
        assert manager.host is not None
        return {"device": set(manager.pool.keys), "host": set(manager.host.pool.keys)}


class Router:
    """A router that keeps a copy of what the node has."""

    def __init__(self, port: Port) -> None:
        self.port = port
        self.found: dict[Tier, set[bytes]] = {"device": set(), "host": set()}
        self.sequence = -1
        self.updates: list[KVCacheUpdate] = []
        self.num_restarts = 0

    def watch(self) -> None:
        self.port.receive(WatchKVCache())

    async def listen(self) -> None:
        """Apply all reports so far."""
        stream = self.port.reports()
        for _ in range(self.port.num_queued):
            update = (await anext(stream)).kv_cache
            if update is not None:
                self._apply(update)

    def _apply(self, update: KVCacheUpdate) -> None:
        self.updates.append(update)
        if update.restart:
            self.num_restarts += 1
            self.found = {"device": set(), "host": set()}
        else:
            assert update.first_sequence == self.sequence, "something is missing"
        self.sequence = update.next_sequence
        for event in update.events:
            match event:
                case BlockStored(hashes, tier=tier):
                    self.found[tier].update(hashes)
                case BlockRemoved(hashes, tier):
                    self.found[tier].difference_update(hashes)
                case AllBlocksCleared():
                    self.found = {"device": set(), "host": set()}


async def test_a_router_that_applies_the_updates_knows_what_the_node_has() -> None:
    rig, rng = Rig(), Random(4)
    router = rig.router()
    rig.work(router, prompt_of(12))
    router.watch()
    rig.driver.run()
    for _ in range(40):
        rig.work(router, prompt_of(rng.choice([4, 9, 16, 30]), rng.randrange(4)))
        await router.listen()
        assert router.found == rig.cached()
    assert router.num_restarts == 1
    kinds = {type(event) for update in router.updates for event in update.events}
    assert kinds == {BlockStored, BlockRemoved}
    assert rig.scheduler.kv_cache_manager.reset_prefix_cache()
    rig.work(router, [1])
    await router.listen()
    assert router.found == rig.cached() == {"device": set(), "host": set()}


async def test_a_router_that_does_not_watch_is_told_nothing_and_nothing_is_recorded() -> None:
    rig = Rig()
    router = rig.router()
    rig.work(router, prompt_of(12))
    await router.listen()
    assert router.updates == []
    assert not rig.log.is_recording


async def test_a_second_router_gets_a_snapshot_first() -> None:
    rig = Rig()
    first, second = rig.router(), rig.router()
    first.watch()
    rig.work(first, prompt_of(12))
    second.watch()
    rig.work(first, prompt_of(12, 3))
    rig.work(first, prompt_of(12, 4))
    for router in (first, second):
        await router.listen()
        assert router.found == rig.cached()
    assert second.updates[0].restart


async def test_events_before_a_router_watches_are_not_sent_to_it() -> None:
    rig = Rig()
    first, second = rig.router(), rig.router()
    first.watch()
    rig.driver.run()
    rig.late_news = []
    rig.work(first, prompt_of(12))
    late, rig.late_news = rig.late_news, None
    second.watch()
    for news in late:
        rig.service.on_step(news)
    rig.driver.run()
    for router in (first, second):
        await router.listen()
        assert router.found == rig.cached()
    assert second.updates[0].restart


async def test_watching_again_sends_a_new_snapshot() -> None:
    rig = Rig()
    router = rig.router()
    router.watch()
    rig.work(router, prompt_of(12))
    router.watch()
    rig.driver.run()
    await router.listen()
    assert router.num_restarts == 2
    assert router.found == rig.cached()


async def test_more_events_in_a_turn_than_are_kept_send_a_new_snapshot() -> None:
    rig = Rig()
    rig.scheduler.kv_cache_manager.kv_events = KVEventLog(capacity=2)
    router = rig.router()
    router.watch()
    rig.driver.run()
    rig.work(router, prompt_of(30))
    rig.work(router, prompt_of(6, 3))
    await router.listen()
    assert router.num_restarts == 2
    assert router.found == rig.cached()


async def test_the_last_router_that_watched_ends_the_recording() -> None:
    rig = Rig()
    first, second = rig.router(), rig.router()
    for router in (first, second):
        router.watch()
    rig.driver.run()
    first.port.close()
    rig.driver.run()
    assert rig.log.is_recording
    second.port.close()
    third = rig.router()
    rig.driver.run()
    assert not rig.log.is_recording
    rig.work(third, prompt_of(12))
    third.watch()
    rig.driver.run()
    await third.listen()
    assert third.found == rig.cached()


@pytest.mark.parametrize("most_hashes", [1, 2, 3, 100])
async def test_a_large_snapshot_comes_in_several_messages(most_hashes: int) -> None:
    keys = [bytes([number]) * 32 for number in range(5)]
    found: dict[Tier, frozenset[bytes]] = {"device": frozenset(keys[:3]), "host": frozenset(keys[2:])}
    router = Rig().router()
    updates = kv_cache_updates(KVSnapshot(found, 7), most_hashes)
    assert all(len(event.block_hashes) <= most_hashes for update in updates for event in update.events)
    for update in updates:
        router._apply(update)
    assert (router.found, router.sequence, router.num_restarts) == (found, 7, 1)


def test_the_snapshot_of_an_empty_cache_is_empty() -> None:
    assert kv_cache_updates(KVSnapshot({"device": frozenset()}, 3)) == [KVCacheUpdate(3, 3, [], restart=True)]


def test_a_batch_has_the_sequence_number_that_it_follows() -> None:
    events = [BlockRemoved([b"a"]), BlockRemoved([b"b"])]
    assert kv_cache_updates(KVEventBatch(events, 9, complete=True)) == [KVCacheUpdate(7, 9, events)]
