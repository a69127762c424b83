"""Tenants that use several routers get no more than others: what routers tell each other of their charges."""

from __future__ import annotations

from functools import partial
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from router.admission.exchange import MAX_ENTRIES, ChargedTotal, LedgerExchange
from router.admission.ledger import Charge, TenantLedger
from router.operations.live_history import LiveHistory, LiveTotals, RouterTotals
from tests.doubles.fake_registry import FakeRegistry, FakeRegistryStore
from tests.doubles.fake_timers import FakeTimers
from tests.support.live_cluster_page import BUCKETS

LARGEST = 400


class Router:
    """The ledger of one router, with requests of tenants that always wait."""

    def __init__(self, *waiting: str, weights: dict[str, float] | None = None) -> None:
        self.ledger = TenantLedger()
        self.exchange = LedgerExchange({"text": self.ledger})
        for tenant in waiting:
            self.ledger.begin_waiting(tenant, (weights or {}).get(tenant, 1.0))

    def serve(self, tokens: int) -> tuple[str, Charge]:
        """Place a request whose prompt has so many tokens."""
        tenant = self.ledger.first()
        assert tenant is not None
        return tenant, self.ledger.charge(tenant, tokens, 0)


def tell(*routers: Router) -> None:
    """One exchange among all routers."""
    totals = [router.exchange.next_totals() for router in routers]
    for router in routers:
        for number, total in enumerate(totals):
            if routers[number] is not router:
                router.exchange.take(f"r{number}", total)


def tell_all(*routers: Router) -> None:
    """The same with what waits at the others, which is as they said it last."""
    totals = {f"r{number}": router.exchange.next_totals() for number, router in enumerate(routers)}
    for number, router in enumerate(routers):
        router.exchange.take_all({name: total for name, total in totals.items() if name != f"r{number}"})


@given(st.integers(2, 4), st.integers(1, 40), st.integers(0, 1 << 30))
def test_a_tenant_gets_as_much_from_two_routers_as_others_from_one(
    num_routers: int, between_exchanges: int, seed: int
) -> None:
    rng, weights = Random(seed), {"everywhere": 2.0}
    routers = [Router("everywhere", f"only-{number}", weights=weights) for number in range(num_routers)]
    tell(*routers)
    served = {"everywhere": 0.0} | {f"only-{number}": 0.0 for number in range(num_routers)}
    for step in range(600):
        tokens = rng.randint(1, LARGEST)
        # Each router gets the same number of seats.
        tenant, charge = routers[step % num_routers].serve(tokens)
        cost = rng.randint(0, tokens)
        served[tenant] += cost / weights.get(tenant, 1.0)
        routers[step % num_routers].ledger.settle(charge, cost, 0)
        if step % between_exchanges == 0:
            tell(*routers)
        # At each router these two have the same service, but for what it does not know of the others yet.
        own = f"only-{step % num_routers}"
        unknown = (between_exchanges + num_routers) / num_routers * (num_routers - 1) * LARGEST
        assert abs(served["everywhere"] - served[own]) <= 2 * LARGEST + unknown


def test_nothing_of_a_dead_router_is_charged_twice_and_its_successor_starts_even() -> None:
    here, there = Router("a", "b"), Router("a")
    tell(here, there)
    there.serve(1000)
    totals = there.exchange.next_totals()
    here.exchange.take("r1", totals)
    assert here.ledger.lag("a") == 1000
    # Its last totals are in the registry for some seconds, and come again after a failure to read them.
    here.exchange.take("r1", totals)
    assert here.ledger.lag("a") == 1000
    # The successor has served something before it was known here, and learns of this router with all that it has done.
    there = Router("a", "b")
    there.serve(300)
    here.exchange.take("r1-again", there.exchange.next_totals())
    there.exchange.take("r0", here.exchange.next_totals())
    assert (here.ledger.lag("a"), there.ledger.lag("a")) == (1000, 300)
    there.serve(50)
    here.exchange.take("r1-again", there.exchange.next_totals())
    assert (here.ledger.lag("a"), here.ledger.lag("b")) == (950, 0), "b has got 50"


def test_what_another_router_gives_back_is_no_gain_here() -> None:
    here, there = Router(), Router("busy")
    tell(here, there)
    _, charge = there.serve(5000)
    tell(here, there)
    assert here.ledger.lag("busy") == 5000
    here.ledger.begin_waiting("other")
    here.ledger.begin_waiting("busy")
    assert here.ledger.lag("busy") == 0, "nobody else wanted it"
    there.ledger.settle(charge, 0, 0)
    tell(here, there)
    here.ledger.charge("busy", 1, 0)
    assert here.ledger.first() == "other"


def test_published_tenants_are_the_latest_and_one_that_comes_back_is_charged_for_new_service_alone() -> None:
    here, there = Router("t0", "else"), Router("t0")
    tell(here, there)
    there.serve(700)
    tell(here, there)
    for number in range(1, MAX_ENTRIES + 1):
        there.ledger.charge(f"t{number}", 1, 0)
    tell(here, there)
    there.ledger.charge("t0", 20, 0)
    totals = there.exchange.next_totals()
    assert len(totals) == MAX_ENTRIES
    here.exchange.take("r1", totals)
    assert here.ledger.lag("t0") == 720
    for _ in range(100):
        totals = there.exchange.next_totals()
    assert [(total.tenant, total.tokens, total.waits) for total in totals] == [("t0", 0.0, True)], "nothing changes"
    here.exchange.take("r1", totals)
    there.ledger.charge("t0", 30, 0)
    here.exchange.take("r1", there.exchange.next_totals())
    assert here.ledger.lag("t0") == 750


async def test_routers_learn_of_charges_through_the_registry_and_are_fair_alone_without_it() -> None:
    store, timers = FakeRegistryStore(), FakeTimers()
    routers, loops = [Router("a", "b") for _ in range(2)], []
    registries = [FakeRegistry(store, "c") for _ in routers]
    for number, router in enumerate(routers):

        def own(number: int, router: Router) -> RouterTotals:
            name = f"r{number}"
            buckets = (0, 0, 0)
            totals = router.exchange.next_totals()
            return RouterTotals(name, f"{name}.x", ttft=buckets, gaps=buckets, charged=totals)

        loop = LiveTotals(
            registries[number],
            timers,
            timers.monotonic,
            partial(own, number, router),
            LiveHistory(BUCKETS),
            router.exchange,
        )
        loop.registered_routers(["r0.x", "r1.x"])
        loops.append(loop)

    async def all_exchange() -> None:
        for loop in (*loops, loops[0]):
            await loop.exchange()

    await all_exchange()
    routers[0].serve(100)
    await all_exchange()
    assert [router.ledger.lag("a") for router in routers] == [100, 100]
    store.stop()
    routers[0].serve(60)
    await all_exchange()
    assert [router.ledger.lag("b") for router in routers] == [60 - 60, 0]
    assert routers[0].ledger.lag("a") == 40, "and its own charges count"
    for registry in registries:
        await registry.close()


def test_a_tenant_is_ahead_of_one_that_waits_at_another_router_and_of_nobody_else() -> None:
    here, there = Router("here", "both"), Router("there", "both")
    tell_all(here, there)
    for _ in range(3):
        here.ledger.charge("here", 100, 0)
        here.ledger.charge("both", 10, 0)
    there.ledger.charge("there", 100, 0)
    tell_all(here, there)
    assert [name for name in ("here", "both", "new") if here.ledger.is_ahead(name)] == ["here"]
    # `there` is ahead of `both` by its last request, and not by more.
    assert not there.ledger.is_ahead("there")
    there.ledger.charge("there", 100, 0)
    assert there.ledger.is_ahead("there")
    # Without exchanges there is nobody to be ahead of, and a tenant that waits at both routers is not ahead of itself.
    here.exchange.take_all({})
    assert not here.ledger.is_ahead("here")
    for _ in range(9):
        here.ledger.charge("both", 100, 0)
    there.ledger.end_waiting("both")
    there.ledger.charge("there", 1000, 0)
    tell_all(here, there)
    assert not here.ledger.is_ahead("both")


def test_tenants_that_use_one_router_each_get_equal_shares_of_what_only_one_of_them_can_have() -> None:
    here, there = Router("here"), Router("there")
    served = {"here": 0, "there": 0}
    for step in range(400):
        if step % 10 == 0:
            tell_all(here, there)
        # This router always hears first of a place, and the other one takes those that are left.
        first, tenant = (there, "there") if here.ledger.is_ahead("here") else (here, "here")
        first.ledger.charge(tenant, 100, 0)
        served[tenant] += 100
    assert abs(served["here"] - served["there"]) <= (10 + 1) * 100


def test_one_that_begins_to_wait_at_another_router_has_the_credit_of_a_burst_and_no_more() -> None:
    here = Router("here")
    here.ledger.charge("late", 100, 0)
    for _ in range(50):
        here.ledger.charge("here", 100, 0)
    for tokens, is_ahead in ((0.0, True), (500.0, False)):
        here.exchange.take_all({"r2": [ChargedTotal("text", "late", 1, tokens, 1.0, waits=True)]})
        assert here.ledger.is_ahead("here") is is_ahead
