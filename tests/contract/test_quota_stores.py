"""One contract for the quotas in Redis and for their in-memory fake: several routers on one store."""

from __future__ import annotations

import asyncio
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from random import Random
from typing import Protocol

import pytest

from baton.errors import ConfigError, Unreachable
from baton.registry.quotas import (
    FULL_ROOM_WAIT_S,
    LEASE_S,
    ConcurrencyUse,
    QuotaStore,
    QuotaUse,
    RateUse,
    Taken,
    unused_s,
)
from baton.registry.redis_quotas import RedisQuotas
from tests.doubles.fake_clock import FakeClock
from tests.doubles.fake_quotas import FakeQuotas, FakeQuotaServer
from tests.support.redis_server import RedisProcess


class Store(Protocol):
    """The store behind the quotas of one test, whose clock is moved by hand."""

    clock: FakeClock

    def router(self) -> QuotaStore: ...

    async def renew(self, router: QuotaStore) -> None:
        """Let a router renew its leases, which it does by itself every few seconds."""
        ...

    async def stop(self) -> None: ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...


class MemoryStore:
    def __init__(self) -> None:
        self.clock = FakeClock(1e9)
        self._server = FakeQuotaServer(self.clock)

    def router(self) -> FakeQuotas:
        return FakeQuotas(self._server)

    async def renew(self, router: QuotaStore) -> None:
        assert isinstance(router, FakeQuotas)
        await router.renew()

    async def stop(self) -> None:
        self._server.up = False

    async def start(self) -> None:
        self._server.up = True

    async def close(self) -> None:
        return


class RedisStore(RedisProcess):
    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir)
        self.clock = FakeClock(1e9)
        self._made: list[RedisQuotas] = []

    def router(self) -> RedisQuotas:
        self._made.append(RedisQuotas.connect(self.url_of("c"), "c", self.clock))
        return self._made[-1]

    async def renew(self, router: QuotaStore) -> None:
        assert isinstance(router, RedisQuotas)
        await router.renew()

    async def close(self) -> None:
        for quotas in self._made:
            await quotas.close()
        await self.stop()


@pytest.fixture(params=["redis", "memory"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    with tempfile.TemporaryDirectory(prefix="baton-test-") as run_dir:
        made: Store = MemoryStore() if request.param == "memory" else RedisStore(Path(run_dir))
        await made.start()
        try:
            yield made
        finally:
            await made.close()


def use(
    lease: str, tokens: float = 0, most: int = 1000, rooms: Sequence[ConcurrencyUse] = (), *, period_s: float = 60.0
) -> QuotaUse:
    rates = [RateUse("tenant:acme:tokens_per_minute", most, period_s, tokens)] if tokens else []
    return QuotaUse(lease, rates, rooms)


def shown(taken: Taken) -> tuple[list[float], int | None, float]:
    """Levels, what was short, and the wait, without what comes of rounding."""
    return [round(level, 2) for level in taken.levels_s], taken.short_of, round(taken.wait_s, 2)


async def test_routers_share_a_bucket_that_fills_again(store: Store) -> None:
    one, two = store.router(), store.router()
    assert shown(await one.take(use("a", 600))) == ([36.0], None, 0.0)
    assert shown(await two.take(use("b", 600))) == ([36.0], 0, 12.0)
    store.clock.advance(11.9)
    assert (await two.take(use("b", 600))).short_of == 0
    store.clock.advance(0.1)
    assert shown(await two.take(use("b", 600))) == ([60.0], None, 0.0)
    store.clock.advance(3600)
    assert shown(await one.take(use("c", 1000))) == ([60.0], None, 0.0), "it holds no more than its limit"


async def test_nothing_is_taken_of_any_limit_if_one_of_them_is_short(store: Store) -> None:
    router = store.router()
    rates = [RateUse("requests", 2, 60.0, 1), RateUse("tokens", 100, 60.0, 60)]
    for lease, short_of in (("a", None), ("b", 1), ("c", 1)):
        assert (await router.take(QuotaUse(lease, rates, [ConcurrencyUse("r", 2)]))).short_of == short_of
    # The refused ones have taken neither a request nor a place.
    assert shown(await router.take(QuotaUse("d", rates[:1], [ConcurrencyUse("r", 2)]))) == ([60.0], None, 0.0)
    full = await router.take(QuotaUse("e", [RateUse("tokens", 100, 60.0, 1)], [ConcurrencyUse("r", 2)]))
    assert (full.short_of, full.wait_s) == (1, FULL_ROOM_WAIT_S)
    longest = await router.take(QuotaUse("e", rates, [ConcurrencyUse("r", 2)]))
    assert shown(longest)[1:] == (0, 30.0), "the longest wait is told"


async def test_what_was_not_used_comes_back_and_what_was_used_beyond_it_is_taken(store: Store) -> None:
    router = store.router()
    taken = use("a", 1000)
    await router.take(taken)
    router.give_back(taken, [unused_s(taken.rates[0], 400, 0.0)])
    assert shown(await router.take(use("b", 600))) == ([60.0], None, 0.0)
    router.give_back(use("b", 600), [unused_s(taken.rates[0], 1100, 0.0)])
    assert shown(await router.take(use("c", 1))) == ([66.0], 0, 6.06)


async def test_what_the_bucket_has_filled_again_does_not_come_back_twice(store: Store) -> None:
    router = store.router()
    long = use("long", 1000)
    await router.take(long)
    store.clock.advance(59)
    await router.take(use("b", 900))
    router.give_back(long, [unused_s(long.rates[0], 0, 59.0)])
    assert shown(await router.take(use("c", 1000))) == ([54.0], 0, 54.0)


async def test_a_room_has_as_many_leases_as_its_limit_over_all_routers(store: Store) -> None:
    one, two = store.router(), store.router()
    room = [ConcurrencyUse("tenant:acme", 2)]
    assert (await one.take(use("a", rooms=room))).short_of is None
    assert (await two.take(use("b", rooms=[ConcurrencyUse("tenant:acme", 0)]))).short_of is None
    assert (await two.take(use("c", rooms=room))).short_of == 0
    one.give_back(use("a", rooms=room), ())
    one.give_back(use("a", rooms=room), ())
    # A router's calls are made in their order.
    assert (await one.take(use("c", rooms=room))).short_of is None
    assert (await two.take(use("d", rooms=room))).short_of == 0


async def test_leases_of_a_router_that_died_expire_and_those_of_others_are_renewed(store: Store) -> None:
    dead, alive = store.router(), store.router()
    room = [ConcurrencyUse("tenant:acme", 2)]
    await dead.take(use("a", rooms=room))
    await alive.take(use("b", rooms=room))
    store.clock.advance(LEASE_S - 0.1)
    assert (await alive.take(use("c", rooms=room))).short_of == 0
    await store.renew(alive)
    store.clock.advance(0.2)
    assert (await alive.take(use("c", rooms=room))).short_of is None
    assert (await alive.take(use("d", rooms=room))).short_of == 0


async def test_leases_are_renewed_while_calls_come_all_the_time(store: Store) -> None:
    router, other = store.router(), store.router()
    room, is_over = [ConcurrencyUse("tenant:acme", 1)], asyncio.Event()

    async def ask(lease: str) -> None:
        while not is_over.is_set():
            await router.take(use(lease))
            await asyncio.sleep(0)  # the store in memory never waits

    await router.take(use("a", rooms=room))
    store.clock.advance(LEASE_S - 0.1)
    # More than one round trip takes, so that there is always a call to be made.
    callers = [asyncio.create_task(ask(f"c{number}")) for number in range(300)]
    await router.take(use("first"))
    await store.renew(router)
    store.clock.advance(0.2)
    assert (await other.take(use("b", rooms=room))).short_of == 0
    is_over.set()
    await asyncio.gather(*callers)


async def test_a_call_that_was_never_made_for_a_cancelled_request_takes_nothing(store: Store) -> None:
    router = store.router()
    if isinstance(router, RedisQuotas):
        request = asyncio.create_task(router.take(use("a", 1000)))
        await asyncio.sleep(0)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        assert (await router.take(use("b", 1000))).short_of is None


async def test_nobody_waits_for_longer_if_the_clock_is_set_back(store: Store) -> None:
    router = store.router()
    await router.take(use("a", 1000))
    store.clock.set_back(3600)
    assert shown(await router.take(use("b", 500))) == ([60.0], 0, 30.0)
    store.clock.advance(30)
    assert shown(await router.take(use("b", 500))) == ([60.0], None, 0.0)


async def test_a_router_that_closes_gives_its_leases_back(store: Store) -> None:
    one, two = store.router(), store.router()
    room = [ConcurrencyUse("tenant:acme", 1)]
    await one.take(use("a", rooms=room))
    await one.close()
    assert (await two.take(use("b", rooms=room))).short_of is None


async def test_nothing_is_taken_while_the_store_is_away_and_routers_go_on_when_it_is_back(store: Store) -> None:
    router = store.router()
    room = [ConcurrencyUse("tenant:acme", 1)]
    await router.take(use("a", rooms=room))
    await store.stop()
    answers = await asyncio.gather(*(router.take(use(str(n), 1)) for n in range(20)), return_exceptions=True)
    assert {type(answer) for answer in answers} == {Unreachable}
    router.give_back(use("a", rooms=room), ())
    await store.start()
    if isinstance(router, RedisQuotas):
        assert (await router.take(use("b", rooms=room))).short_of is None


@pytest.mark.parametrize("seed", range(3))
async def test_no_window_has_more_than_a_full_bucket_and_what_it_gained(store: Store, seed: int) -> None:
    """Whatever requests take, use and give back, at several routers."""
    rng, routers = Random(seed), [store.router(), store.router()]
    limit, used = 100, deque[tuple[float, float]]()
    running: list[tuple[QuotaUse, float]] = []
    num_taken = 0
    for number in range(400):
        store.clock.advance(rng.choice([0.0, 0.01, rng.expovariate(0.5)]))
        now = store.clock.monotonic()
        asked = use(str(number), rng.randint(1, limit), limit, period_s=60.0)
        if (await rng.choice(routers).take(asked)).short_of is None:
            running.append((asked, now))
        while running and rng.random() < 0.3:
            ended, began = running.pop(rng.randrange(len(running)))
            spent = rng.uniform(0, ended.rates[0].cost)
            routers[0].give_back(ended, [unused_s(ended.rates[0], spent, now - began)])
            used.append((began, spent))
            num_taken += 1
            # The same router's next call comes after it.
            await routers[0].take(use("sync", 0.001, limit))
    used.extend((began, ended.rates[0].cost) for ended, began in running)
    moments = sorted({began for began, _ in used})
    for first in moments:
        for last in (moment for moment in moments if moment >= first):
            spent = sum(tokens for began, tokens in used if first <= began <= last)
            assert spent <= limit * (1 + (last - first) / 60.0) + 0.01
    assert num_taken > 20


def test_a_bad_url_is_refused() -> None:
    with pytest.raises(ConfigError):
        RedisQuotas.connect("http://x", "c")
