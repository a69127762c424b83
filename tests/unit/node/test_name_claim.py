"""Only one process at a time can have a name."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from dataclasses import replace

import pytest

from baton.errors import BatonError, ConfigError, DeadlineExceeded, NobodyListens, PermissionDenied, Unreachable
from baton.node.name_claim import Asks, require_first, require_free_name, start_number
from baton.node.process import asks_with as asks_of_node
from baton.registry import NodeRecord
from baton.wire.credentials import PLAINTEXT_DIALER
from router.app import asks_with as asks_of_router
from tests.doubles.fake_registry import FakeRegistry, FakeRegistryStore
from tests.support.free_ports import first_free_port
from tests.support.router_parts import prefill, record_of

LEASE_S = 0.05
OLD = replace(record_of(prefill(run=1), started_at=1.0), lease_s=LEASE_S)
NEW = replace(record_of(prefill(run=2), started_at=2.0), lease_s=LEASE_S)


def answers(said: Mapping[str, str | BatonError]) -> Asks:
    """Answers for each address as `said` has them."""

    async def asks(record: NodeRecord) -> str:
        answer = said.get(record.address, NobodyListens("nobody there"))
        if isinstance(answer, BatonError):
            raise answer
        return answer

    return asks


@pytest.fixture
def store() -> FakeRegistryStore:
    return FakeRegistryStore()


async def test_a_name_without_a_record_is_free(store: FakeRegistryStore) -> None:
    registry = FakeRegistry(store, "c")
    await registry.lease(record_of(prefill("another")))
    await require_free_name(registry, "p1", answers({}))
    await registry.close()


@pytest.mark.parametrize("said", [NobodyListens("refused"), "somebody.else"])
async def test_a_record_whose_process_is_gone_does_not_block_its_name(
    store: FakeRegistryStore, said: str | BatonError
) -> None:
    registry = FakeRegistry(store, "c")
    await registry.lease(OLD)
    await require_free_name(registry, "p1", answers({OLD.address: said}))
    await registry.close()


async def test_the_second_process_of_a_name_is_told_which_one_has_it(store: FakeRegistryStore) -> None:
    registry = FakeRegistry(store, "c")
    await registry.lease(OLD)
    with pytest.raises(
        ConfigError, match=r"the name p1 is taken: p1\.1 at 127\.0\.0\.1:\d+ \(pid \d+\) lives; .*--node-id"
    ):
        await require_free_name(registry, "p1", answers({OLD.address: "p1.1"}))
    await registry.close()


@pytest.mark.parametrize("said", [DeadlineExceeded("silent"), PermissionDenied("not you"), Unreachable("reset")])
async def test_a_process_that_does_not_identify_itself_lives_if_it_renews_its_record(
    store: FakeRegistryStore, said: BatonError
) -> None:
    registry, asks = FakeRegistry(store, "c"), answers({OLD.address: said})
    lease = await registry.lease(OLD)
    with pytest.raises(ConfigError, match="is taken"):
        await require_free_name(registry, "p1", asks)
    await lease.abandon()
    await require_free_name(registry, "p1", asks)
    await registry.close()


async def test_the_record_of_an_earlier_process_is_removed_when_its_successor_is_there(
    store: FakeRegistryStore,
) -> None:
    registry = FakeRegistry(store, "c")
    await (await registry.lease(OLD)).abandon()
    silent = replace(record_of(prefill(run=3), started_at=1.5), lease_s=LEASE_S)
    await registry.lease(silent)
    await registry.lease(NEW)
    await require_first(registry, NEW, answers({silent.address: DeadlineExceeded("silent"), NEW.address: "p1.2"}))
    assert await registry.namesakes("p1") == [silent, NEW]
    await registry.close()


async def test_a_start_has_no_number_while_the_registry_does_not_answer(store: FakeRegistryStore) -> None:
    registry = FakeRegistry(store, "c")
    assert await start_number(registry, "p1") == 1
    store.stop()
    assert await start_number(registry, "p1") == 0
    await registry.close()


async def test_of_two_processes_that_start_at_once_the_later_one_ends(store: FakeRegistryStore) -> None:
    registry = FakeRegistry(store, "c")
    await registry.lease(OLD)
    await registry.lease(NEW)
    both = answers({OLD.address: "p1.1", NEW.address: "p1.2"})
    await require_first(registry, OLD, both)
    with pytest.raises(ConfigError, match=r"p1\.1 at"):
        await require_first(registry, NEW, both)
    await require_first(registry, NEW, answers({NEW.address: "p1.2"}))
    store.stop()
    await require_first(registry, NEW, both)
    with pytest.raises(ConfigError, match="does not answer"):
        await require_free_name(registry, "p1", both)
    await registry.close()


async def test_a_call_that_fails_proves_nothing_of_a_process_that_listens() -> None:
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        record = replace(OLD, address=f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        for asks in (asks_of_router(PLAINTEXT_DIALER), asks_of_node(PLAINTEXT_DIALER)):
            with pytest.raises(Unreachable) as failed:
                await asks(record)
            assert not isinstance(failed.value, NobodyListens)


@pytest.mark.timeout(20)
async def test_asking_for_an_incarnation_leaves_no_thread_behind() -> None:
    before = set(threading.enumerate())
    with pytest.raises(NobodyListens):
        await asks_of_router(PLAINTEXT_DIALER)(replace(OLD, address=f"127.0.0.1:{first_free_port(1)}"))
    for thread in set(threading.enumerate()) - before:
        await asyncio.to_thread(thread.join)
