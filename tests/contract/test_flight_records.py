"""One contract for the records of requests in Redis and for their in-memory fake."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Protocol

import pytest
from redis import asyncio as redis_client

from baton.errors import ConfigError
from baton.registry.base import ENDED_S, MAX_RECORD_BYTES, FlightRecords
from baton.registry.redis_flights import MAX_PENDING, RedisFlightRecords
from tests.doubles.fake_flight_records import LIFETIME_S, FakeFlightRecords, FakeFlightStore
from tests.support.redis_server import RedisProcess

BOUND_S = 30.0


class Server(Protocol):
    """The store behind the records of one test."""

    def connect(self, cluster: str = "c") -> FlightRecords: ...

    async def lifetime_s(self, request_id: str) -> float | None:
        """Return the remaining lifetime of a record in seconds."""
        ...

    async def stop(self) -> None: ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...


class FakeServer:
    def __init__(self) -> None:
        self._store = FakeFlightStore()

    def connect(self, cluster: str = "c") -> FlightRecords:
        return FakeFlightRecords(self._store, cluster)

    async def lifetime_s(self, request_id: str) -> float | None:
        return self._store.lifetime_s("c", request_id)

    async def stop(self) -> None:
        self._store.up = False

    async def start(self) -> None:
        self._store.up = True

    async def close(self) -> None:
        return


class RedisServer(RedisProcess):
    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir)
        self._made: list[RedisFlightRecords] = []

    def connect(self, cluster: str = "c") -> RedisFlightRecords:
        self._made.append(RedisFlightRecords.connect(self.url_of(cluster), cluster, lifetime_s=LIFETIME_S))
        return self._made[-1]

    async def lifetime_s(self, request_id: str) -> float | None:
        async with redis_client.Redis.from_url(self.url) as client:
            left_ms = await client.pttl(f"baton:c:flight:{request_id}")
        return left_ms / 1000 if left_ms >= 0 else None

    async def close(self) -> None:
        for records in self._made:
            await records.close()
        await self.stop()


@pytest.fixture(params=["redis", "memory"])
async def server(request: pytest.FixtureRequest) -> AsyncIterator[Server]:
    with tempfile.TemporaryDirectory(prefix="baton-test-") as run_dir:
        made: Server = FakeServer() if request.param == "memory" else RedisServer(Path(run_dir))
        await made.start()
        try:
            yield made
        finally:
            await made.close()


async def wait_for_record(records: FlightRecords, request_id: str, wanted: bytes | None) -> None:
    """Return once another process reads this value."""
    async with asyncio.timeout(BOUND_S):
        while await records.get(request_id) != wanted:
            pass


async def test_an_unreachable_redis_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    nobody = RedisFlightRecords.connect(f"unix://{tmp_path}/nobody.sock", "c", lifetime_s=LIFETIME_S)
    with caplog.at_level(logging.INFO):
        for number in range(20):
            assert await nobody.get(str(number)) is None
    await nobody.close()
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1
    assert told[0].startswith("the record of request 0 can't be read from Redis")


async def test_another_process_finds_the_latest_record_of_its_own_cluster(server: Server) -> None:
    writer, reader, stranger = server.connect(), server.connect(), server.connect("other")
    assert await reader.get("r") is None
    writer.put("r", b"one")
    writer.put("r", b"\xfftwo")
    writer.put("s", b"three")
    await wait_for_record(reader, "r", b"\xfftwo")
    await wait_for_record(reader, "s", b"three")
    assert await stranger.get("r") is None
    assert ENDED_S < (await server.lifetime_s("r") or 0) <= LIFETIME_S


async def test_the_record_of_an_ended_request_is_kept_for_a_short_time(server: Server) -> None:
    writer, reader = server.connect(), server.connect()
    writer.put("early", b"1")
    await wait_for_record(reader, "early", b"1")
    writer.expire_soon("early")
    writer.put("at once", b"2")
    writer.expire_soon("at once")
    writer.expire_soon("unknown")
    writer.put("last", b"3")
    await wait_for_record(reader, "last", b"3")
    assert (await reader.get("early"), await reader.get("at once")) == (b"1", b"2")
    for request_id in ("early", "at once"):
        assert 0 < (await server.lifetime_s(request_id) or 0) <= ENDED_S
    assert await server.lifetime_s("unknown") is None


async def test_the_end_of_one_flight_does_not_end_another_flight_of_the_same_request(server: Server) -> None:
    first, second = server.connect(), server.connect()
    first.put("r", b"first", 1)
    await wait_for_record(second, "r", b"first")
    second.put("r", b"second", 2)
    await wait_for_record(first, "r", b"second")
    first.expire_soon("r", 1)
    first.put("s", b"written behind that end", 1)
    await wait_for_record(second, "s", b"written behind that end")
    assert (await server.lifetime_s("r") or 0) > ENDED_S
    second.expire_soon("r", 2)
    second.put("s", b"and behind that one", 2)
    await wait_for_record(first, "s", b"and behind that one")
    assert 0 < (await server.lifetime_s("r") or 0) <= ENDED_S


async def test_no_call_fails_while_the_server_is_away_and_later_records_are_written(server: Server) -> None:
    writer, reader = server.connect(), server.connect()
    writer.put("before", b"1")
    await wait_for_record(reader, "before", b"1")
    await server.stop()
    writer.put("meanwhile", b"2")
    writer.expire_soon("before")
    assert await reader.get("meanwhile") is None
    await server.start()
    writer.put("after", b"3")
    await wait_for_record(reader, "after", b"3")


async def test_a_record_that_is_too_large_is_counted(server: Server) -> None:
    writer = server.connect()
    writer.put("r", bytes(MAX_RECORD_BYTES + 1))
    assert writer.num_lost == 1
    assert await writer.get("r") is None


@pytest.fixture
async def redis() -> AsyncIterator[RedisServer]:
    with tempfile.TemporaryDirectory(prefix="baton-test-") as run_dir:
        made = RedisServer(Path(run_dir))
        try:
            yield made
        finally:
            await made.close()


async def test_unwritten_records_are_written_when_the_server_is_back(redis: RedisServer) -> None:
    writer, reader = redis.connect(), redis.connect()
    writer.put("r", b"old")
    writer.put("s", b"other")
    assert await reader.get("r") is None
    writer.put("r", b"new")
    assert await writer.get("r") == b"new"
    await redis.start()
    await wait_for_record(reader, "r", b"new")
    await wait_for_record(reader, "s", b"other")
    assert writer.num_lost == 0


async def test_a_record_that_can_not_be_written_is_counted_and_later_ones_are_written(redis: RedisServer) -> None:
    await redis.start()
    writer, reader = redis.connect(), redis.connect()
    writer.put("broken", "no bytes")  # type: ignore[arg-type]
    async with asyncio.timeout(BOUND_S):
        while not writer.num_lost:
            await reader.get("broken")
    writer.put("r", b"behind it")
    await wait_for_record(reader, "r", b"behind it")
    assert writer.num_lost == 1


async def test_pending_records_are_bounded_and_the_oldest_are_dropped(redis: RedisServer) -> None:
    writer, reader = redis.connect(), redis.connect()
    for number in range(MAX_PENDING + 5):
        writer.put(f"r{number}", b"x")
    assert await reader.get("r0") is None
    assert writer.num_lost == 5
    await redis.start()
    await wait_for_record(reader, f"r{MAX_PENDING + 4}", b"x")
    await wait_for_record(reader, "r5", b"x")
    assert await reader.get("r4") is None


async def test_closing_writes_the_pending_records(redis: RedisServer) -> None:
    writer, reader = redis.connect(), redis.connect()
    await redis.start()
    writer.put("r", b"x")
    await writer.close()
    await writer.close()
    writer.put("late", b"x")
    assert await reader.get("r") == b"x"
    assert await writer.get("late") is None
    with pytest.raises(ConfigError, match="is no URL of Redis"):
        RedisFlightRecords.connect("http://r", "c", lifetime_s=LIFETIME_S)


async def test_many_concurrent_readers_share_a_few_connections(redis: RedisServer) -> None:
    await redis.start()
    records = redis.connect()
    async with redis_client.Redis.from_url(redis.redis.url) as looking:
        before = len(await looking.client_list())
        assert await asyncio.gather(*(records.get(f"nobody-{number}") for number in range(200))) == [None] * 200
        assert len(await looking.client_list()) - before <= 4
    await records.close()
