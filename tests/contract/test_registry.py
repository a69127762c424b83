"""One contract for the registry in Redis and for its in-memory fake."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import pytest
from redis import asyncio as redis_client
from redis.exceptions import OutOfMemoryError

from baton.errors import ConfigError, Unreachable
from baton.registry.embedded import embedded_redis
from baton.registry.records import NodeRecord, Snapshot
from baton.registry.registry import RESERVES, RedisLease, Registry
from baton.registry.server_memory import server_memory
from tests.doubles.fake_registry import FakeLease, FakeRegistry, FakeRegistryStore
from tests.support.redis_server import RedisProcess

AnyRegistry = Registry | FakeRegistry
AnyLease = RedisLease | FakeLease
BOUND_S = 30.0


class Server(Protocol):
    """The store behind the registries of one test."""

    def connect(self, cluster: str = "c") -> AnyRegistry: ...

    async def stop(self) -> None: ...

    async def start_empty(self) -> None: ...

    async def flush(self) -> None: ...

    async def put(self, incarnation: str, data: bytes) -> None: ...

    async def close(self) -> None: ...


class FakeServer:
    def __init__(self) -> None:
        self._store = FakeRegistryStore()
        self._made: list[AnyRegistry] = []

    def connect(self, cluster: str = "c") -> AnyRegistry:
        self._made.append(FakeRegistry(self._store, cluster))
        return self._made[-1]

    async def stop(self) -> None:
        self._store.stop()

    async def start_empty(self) -> None:
        self._store.restart(empty=True)

    async def flush(self) -> None:
        self._store.restart(empty=True)

    async def put(self, incarnation: str, data: bytes) -> None:
        self._store.put("c", incarnation, data)

    async def close(self) -> None:
        for registry in self._made:
            await registry.close()


class RedisServer(RedisProcess):
    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir)
        self._made: list[AnyRegistry] = []

    def socket_mode(self) -> int:
        return self.redis.socket.stat().st_mode & 0o777

    def connect(self, cluster: str = "c") -> Registry:
        registry = Registry.connect(self.url_of(cluster), cluster)
        self._made.append(registry)
        return registry

    async def start_empty(self) -> None:
        await self.start()

    async def flush(self) -> None:
        async with redis_client.Redis.from_url(self.url) as client:
            await client.flushall()

    async def put(self, incarnation: str, data: bytes) -> None:
        async with redis_client.Redis.from_url(self.url) as client:
            await client.set(f"baton:c:node:{incarnation}", data)
            await client.sadd("baton:c:nodes", incarnation)
            await client.publish("baton:c:changes", incarnation)

    async def close(self) -> None:
        for registry in self._made:
            await registry.close()
        await self.stop()


@pytest.fixture(params=["redis", "memory"])
async def server(request: pytest.FixtureRequest) -> AsyncIterator[Server]:
    with tempfile.TemporaryDirectory(prefix="baton-test-") as run_dir:
        made: Server = FakeServer() if request.param == "memory" else RedisServer(Path(run_dir))
        await made.start_empty()
        try:
            yield made
        finally:
            await made.close()


def node(name: str = "prefill-0", run: str = "a", *, started_at: float = 1.0, lease_s: float = 30.0) -> NodeRecord:
    return NodeRecord(
        name=name,
        role="prefill",
        incarnation=f"{name}.{run}",
        address="127.0.0.1:4000",
        pid=7,
        version="0.1.0",
        started_at=started_at,
        lease_s=lease_s,
        model="tiny",
        vocab_size=10,
        max_model_len=64,
        block_size=16,
        num_blocks=8,
        eos_token_ids=frozenset({2, 1}),
    )


async def wait_for_snapshot(watch: AsyncIterator[Snapshot], condition: Callable[[Snapshot], bool]) -> Snapshot:
    """Return the first snapshot for which the condition holds."""
    async with asyncio.timeout(BOUND_S):
        async for snapshot in watch:
            if condition(snapshot):
                return snapshot
    raise AssertionError("the watch ended")


async def test_a_leased_record_is_seen_whole_and_a_closed_one_is_gone_at_once(server: Server) -> None:
    watch = server.connect().watch()
    assert dict(await anext(watch)) == {}
    owner = server.connect()
    lease = await owner.lease(node())
    assert await wait_for_snapshot(watch, bool) == {"prefill-0": node()}
    await lease.close()
    await lease.close()
    assert dict(await wait_for_snapshot(watch, lambda s: not s)) == {}
    assert dict(await owner.read()) == {}


async def test_an_update_is_noticed(server: Server) -> None:
    watch = server.connect().watch()
    lease = await server.connect().lease(node())
    await wait_for_snapshot(watch, bool)
    await lease.update(replace(node(), state="draining"))
    assert (await wait_for_snapshot(watch, lambda s: s["prefill-0"].state != "ready"))["prefill-0"].state == "draining"
    with pytest.raises(ValueError, match=r"prefill-0\.a"):
        await lease.update(node(run="b"))


async def test_a_record_outlives_a_killed_process_by_its_lease_only(server: Server) -> None:
    watch = server.connect().watch()
    kept = await server.connect().lease(node("kept", lease_s=1.0))
    dying: AnyLease = await server.connect().lease(node("dying", lease_s=1.0))
    await wait_for_snapshot(watch, lambda s: len(s) == 2)
    await dying.abandon()
    assert list(await wait_for_snapshot(watch, lambda s: "dying" not in s)) == ["kept"]
    await kept.close()


async def test_the_latest_incarnation_of_a_name_is_listed(server: Server) -> None:
    registry = server.connect()
    new = await registry.lease(node(run="new", started_at=2.0))
    old = await server.connect().lease(node(run="old", started_at=1.0))
    assert (await registry.read())["prefill-0"].incarnation == "prefill-0.new"
    await old.close()
    assert (await registry.read())["prefill-0"].incarnation == "prefill-0.new"
    await new.close()
    assert dict(await registry.read()) == {}


async def test_start_numbers_decide_over_clocks_which_incarnation_is_the_latest(server: Server) -> None:
    registry = server.connect()
    first, second = await registry.next_start("prefill-0"), await server.connect().next_start("prefill-0")
    assert first < second
    await registry.lease(replace(node(run="old", started_at=1000.0), start_number=first))
    new = replace(node(run="new", started_at=999.0), start_number=second)
    await server.connect().lease(new)
    assert (await registry.read())["prefill-0"] == new
    assert [one.incarnation for one in await registry.namesakes("prefill-0")] == ["prefill-0.old", "prefill-0.new"]
    # One of a version that counts no starts is older than any that does.
    await server.connect().lease(node(run="of-an-old-version", started_at=2000.0))
    assert (await registry.read())["prefill-0"] == new


async def test_start_numbers_of_a_flushed_registry_continue_from_the_rewritten_records(server: Server) -> None:
    registry = server.connect()
    for _ in range(5):
        number = await registry.next_start("prefill-0")
    await server.flush()
    lease = await registry.lease(replace(node(), start_number=number))
    assert await registry.next_start("prefill-0") > number
    await lease.close()


async def test_the_record_of_a_dead_process_can_be_removed(server: Server) -> None:
    registry = server.connect()
    lease = await server.connect().lease(node())
    await lease.abandon()
    await registry.retract(node())
    assert dict(await registry.read()) == {}


async def test_clusters_do_not_see_each_other(server: Server) -> None:
    await server.connect("one").lease(node("a"))
    await server.connect("two").lease(node("b"))
    assert list(await server.connect("one").read()) == ["a"]
    assert list(await server.connect("two").read()) == ["b"]


async def test_a_strangers_bad_record_is_skipped_and_counted(server: Server) -> None:
    registry = server.connect()
    watch = registry.watch()
    await anext(watch)
    good = json.loads(node("liar").to_json())
    await server.put("no-json", b"\xff{")
    await server.put("deep", b"[" * 15_000)
    await server.put("big", b" " * 20_000)
    await server.put("bad-type", json.dumps(good | {"pid": "7", "incarnation": "bad-type"}).encode())
    await server.put("another", json.dumps(good).encode())
    await server.connect().lease(node())
    assert list(await wait_for_snapshot(watch, bool)) == ["prefill-0"]
    assert registry.bad_records == 5
    assert registry.healthy


async def test_readers_keep_the_last_view_while_the_registry_is_away_and_nodes_register_again_at_an_empty_one(
    server: Server,
) -> None:
    reader, owner = server.connect(), server.connect()
    watch = reader.watch()
    await owner.lease(node("a", lease_s=3.0))
    await owner.lease(node("b", lease_s=3.0))
    assert list(await wait_for_snapshot(watch, lambda s: len(s) == 2)) == ["a", "b"]
    assert reader.healthy

    await server.stop()
    with pytest.raises(Unreachable, match=r"registry .*does not answer"):
        await reader.ping()
    assert not reader.healthy
    with pytest.raises(Unreachable):
        await reader.read()
    late = await owner.lease(node("late"))

    await server.start_empty()
    # The empty registry must never be believed: no snapshot on the way misses a node that was there.
    async with asyncio.timeout(BOUND_S):
        async for snapshot in watch:
            assert {"a", "b"} <= set(snapshot)
            if "late" in snapshot:
                break
    fresh = server.connect()
    seen = await wait_for_snapshot(fresh.watch(), lambda s: len(s) == 3)
    assert seen == {"a": node("a", lease_s=3.0), "b": node("b", lease_s=3.0), "late": node("late")}
    assert late.record == node("late")
    await reader.ping()
    assert reader.healthy


async def test_a_flushed_registry_loses_no_node(server: Server) -> None:
    reader, owner = server.connect(), server.connect()
    watch = reader.watch()
    await owner.lease(node("a", lease_s=1.0))
    await wait_for_snapshot(watch, bool)
    await server.flush()
    await owner.lease(node("b", lease_s=1.0))
    async with asyncio.timeout(BOUND_S):
        async for snapshot in watch:
            assert "a" in snapshot
            if "b" in snapshot:
                break
    await wait_for_snapshot(server.connect().watch(), lambda s: set(s) == {"a", "b"})


async def test_two_watches_see_the_same_and_end_when_the_registry_closes(server: Server) -> None:
    registry = server.connect()
    first, second = registry.watch(), registry.watch()
    await anext(first)
    await anext(second)
    await server.connect().lease(node())
    assert await wait_for_snapshot(first, bool) == await wait_for_snapshot(second, bool)
    await registry.close()
    await registry.close()
    assert [s async for s in first] == []
    assert [s async for s in second] == []


async def test_a_cancelled_caller_leaves_no_reply_for_the_next(server: Server) -> None:
    registry = server.connect()
    await registry.lease(node())
    for _ in range(50):
        callers = [asyncio.create_task(registry.read()) for _ in range(3)]
        await asyncio.sleep(0)
        for caller in callers:
            caller.cancel()
        await asyncio.gather(*callers, return_exceptions=True)
        assert list(await registry.read()) == ["prefill-0"]
        await registry.ping()


@pytest.fixture
async def redis_server() -> AsyncIterator[RedisServer]:
    with tempfile.TemporaryDirectory(prefix="baton-test-") as run_dir:
        server = RedisServer(Path(run_dir))
        await server.start_empty()
        try:
            yield server
        finally:
            await server.close()


async def connections(client: redis_client.Redis) -> tuple[int, int]:
    """Return how many connections the server has accepted since its start, and how many are open."""
    taken = (await client.info("stats"))["total_connections_received"]
    return taken, (await client.info("clients"))["connected_clients"]


async def test_a_cancelled_callers_operation_runs_to_its_end_on_its_connection(redis_server: RedisServer) -> None:
    registry = redis_server.connect()
    await registry.ping()
    async with redis_client.Redis.from_url(redis_server.url) as client:
        made_before, open_before = await connections(client)
        for turns in range(40):
            caller = asyncio.create_task(registry.read())
            # Cancelled before it asks, while the reply is under way, and when it has it.
            for _ in range(turns % 10):
                await asyncio.sleep(0)
            caller.cancel()
            await asyncio.gather(caller, return_exceptions=True)
            await registry.ping()
        made_after, open_after = await connections(client)
    # How many operations overlap is the machine's affair, and so is how many connections are made; none is ever broken.
    assert made_after - made_before == open_after - open_before


async def test_changes_are_published_and_renewals_are_not(redis_server: RedisServer) -> None:
    async with redis_client.Redis.from_url(redis_server.url) as client, client.pubsub() as told:
        await told.subscribe("baton:c:changes")
        registry = Registry.connect(redis_server.url, "c")
        lease = await registry.lease(node())
        await registry.publish(node())
        await lease.update(replace(node(), state="draining"))
        await registry.close()
        await client.publish("baton:c:changes", "end")
        heard = []
        async with asyncio.timeout(BOUND_S):
            async for message in told.listen():
                if message["type"] == "message":
                    heard.append(message["data"])
                    if message["data"] == b"end":
                        break
    assert heard == [b"prefill-0.a", b"prefill-0.a", b"prefill-0.a", b"end"]


SMALL = 512
"""The size in bytes of each key that fills the server."""


async def fill(client: redis_client.Redis, prefix: str) -> None:
    """Fill the memory of the server with other keys."""
    number = 0
    while True:
        number += 1
        try:
            await client.set(f"{prefix}:{number}", b"x" * SMALL)
        except OutOfMemoryError:
            return


async def wait_until_renewed(client: redis_client.Redis, key: str) -> None:
    """Return once the record has been renewed; fails if it expires instead."""
    before = await client.pttl(key)
    async with asyncio.timeout(BOUND_S):
        while (left := await client.pttl(key)) <= before:
            assert left > 0, "the record has ended"
            before = left
            await asyncio.sleep(0)


async def test_members_stay_and_new_ones_come_while_redis_is_full(redis_server: RedisServer) -> None:
    registry = redis_server.connect()
    old = node("old", lease_s=1.0)
    lease = await registry.lease(old)
    async with redis_client.Redis.from_url(redis_server.url) as client:
        used = (await client.info("memory"))["used_memory"]
        await client.config_set("maxmemory", used + 3_000_000)
        await fill(client, "stranger")
        for _ in range(6):
            await wait_until_renewed(client, f"baton:c:node:{old.incarnation}")
        assert await client.exists(*RESERVE_KEYS) == len(RESERVE_KEYS)
        for number in range(5):
            await redis_server.connect().lease(node(f"new-{number}"))
            await fill(client, f"again-{number}")
        changed = replace(old, state="draining")
        await lease.update(changed)
        found = await registry.read()
        assert sorted(found) == ["new-0", "new-1", "new-2", "new-3", "new-4", "old"]
        assert found["old"] == changed

        # What membership gave up is there again when there is memory.
        await client.config_set("maxmemory", 0)
        assert await client.exists(*RESERVE_KEYS) < len(RESERVE_KEYS)
        await redis_server.connect().lease(node("later"))
        assert await client.exists(*RESERVE_KEYS) == len(RESERVE_KEYS)


RESERVE_KEYS = [f"baton:c:reserve:{number}" for number in range(RESERVES)]


async def test_a_record_overwritten_by_others_is_written_again(redis_server: RedisServer) -> None:
    registry = redis_server.connect()
    await registry.lease(node(lease_s=30.0))
    await redis_server.put("prefill-0.a", b"not a record")
    await registry.publish(node())
    assert (await registry.read())["prefill-0"] == node()


async def test_without_permission_to_count_start_numbers_follow_from_the_records(redis_server: RedisServer) -> None:
    registry = redis_server.connect()
    async with redis_client.Redis.from_url(redis_server.url) as client:
        await client.execute_command("ACL", "SETUSER", "c", "-incrby")  # type: ignore[no-untyped-call]  # redis has no types here
    assert await registry.next_start("prefill-0") == 0
    await registry.lease(replace(node(), start_number=7))
    assert await registry.next_start("prefill-0") == 8


async def test_the_memory_limits_of_redis_are_read_and_errors_hide_the_password(redis_server: RedisServer) -> None:
    found = await server_memory(redis_server.url)
    assert (found.policy, found.max_bytes, found.error) == ("noeviction", 256 << 20, "")
    assert 0 < found.used_bytes < found.max_bytes
    refused = await server_memory(redis_server.url_of("c"))
    assert "no permissions" in refused.error.lower()
    assert "secret" not in refused.error


async def test_the_embedded_server_is_private(redis_server: RedisServer, tmp_path: Path) -> None:
    assert redis_server.socket_mode() == 0o700
    async with redis_client.Redis.from_url(redis_server.url) as client:
        config = await client.config_get("*")
    assert config["port"] == "0"
    assert config["save"] == ""
    assert config["appendonly"] == "no"
    assert int(config["maxmemory"] or 0) > 0
    assert config["maxmemory-policy"] == "noeviction"
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    assert len(str(embedded_redis(deep).socket)) <= 107


async def test_invalid_urls_are_refused_and_errors_hide_the_password() -> None:
    with pytest.raises(ConfigError, match="redis://"):
        Registry.connect("localhost:6379", "c")
    unreachable = Registry.connect("redis://user:secret@127.0.0.1:1/0", "c")
    with pytest.raises(Unreachable) as caught:
        await unreachable.ping()
    assert "secret" not in str(caught.value)
    assert "127.0.0.1:1" in str(caught.value)
    await unreachable.close()


async def test_routers_exchange_their_totals(server: Server) -> None:
    one, other, stranger = server.connect(), server.connect(), server.connect("another")
    assert await one.exchange_totals("r0.x", b"first", ["r1.x"]) == {}
    assert await other.exchange_totals("r1.x", b"second", ["r0.x", "never"]) == {"r0.x": b"first"}
    assert await one.exchange_totals("r0.x", b"third", ["r1.x"]) == {"r1.x": b"second"}
    assert await other.exchange_totals("r1.x", b"second", ["r0.x"]) == {"r0.x": b"third"}
    assert await other.exchange_totals("r1.x", b"second", []) == {}
    assert await stranger.exchange_totals("r2.x", b"", ["r0.x"]) == {}
    await server.stop()
    with pytest.raises(Unreachable):
        await one.exchange_totals("r0.x", b"fourth", [])
