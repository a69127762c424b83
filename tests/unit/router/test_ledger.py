"""Tenants get shares of the service by their weights."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.admission.ledger import TenantLedger

OUTPUT_WEIGHT = 2.0
LONGEST_PROMPT, LONGEST_OUTPUT = 500, 300
LARGEST = LONGEST_PROMPT + OUTPUT_WEIGHT * LONGEST_OUTPUT


class Service:
    """Serves requests of tenants that always have some waiting, a few at a time."""

    def __init__(self, weights: dict[str, float], seats: int, seed: int) -> None:
        self.ledger, self.weights = TenantLedger(OUTPUT_WEIGHT), weights
        self.served = dict.fromkeys(weights, 0.0)
        self.running: list[tuple[str, object, int, int]] = []
        self.seats, self.rng = seats, Random(seed)
        for tenant, weight in weights.items():
            self.ledger.begin_waiting(tenant, weight)

    def place(self) -> str:
        """Place the next request, once an earlier one has ended if there is no seat."""
        if len(self.running) == self.seats:
            self.end(self.rng.randrange(self.seats))
        tenant = self.ledger.first()
        assert tenant is not None
        # Each tenant has requests of its own kind.
        kind = Random(tenant)
        prompt = self.rng.randint(1, kind.randint(1, LONGEST_PROMPT))
        output = self.rng.randint(1, kind.randint(1, LONGEST_OUTPUT))
        charge = self.ledger.charge(tenant, prompt, LONGEST_OUTPUT)
        self.running.append((tenant, charge, prompt, output))
        return tenant

    def end(self, number: int) -> None:
        tenant, charge, prompt, output = self.running.pop(number)
        self.ledger.settle(charge, prompt, output)  # type: ignore[arg-type]
        self.served[tenant] += prompt + OUTPUT_WEIGHT * output


@given(
    st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.0]), min_size=2, max_size=6),
    st.integers(1, 8),
    st.integers(0, 1 << 30),
)
def test_tenants_that_always_wait_get_service_by_their_weights(weights: list[float], seats: int, seed: int) -> None:
    service = Service({f"t{number}": weight for number, weight in enumerate(weights)}, seats, seed)
    for _ in range(300):
        service.place()
        got = [service.served[tenant] / weight for tenant, weight in service.weights.items()]
        # The bound of the fluid reference: a charge ahead of it and one behind, and what runs and is not served yet.
        in_flight = seats * LARGEST / min(weights)
        assert max(got) - min(got) <= 2 * LARGEST / min(weights) + in_flight


def test_of_requests_of_one_length_three_times_the_weight_gets_three_times_the_places() -> None:
    ledger = TenantLedger()
    ledger.begin_waiting("light", 1.0)
    ledger.begin_waiting("heavy", 3.0)
    places = []
    for _ in range(400):
        tenant = ledger.first()
        assert tenant is not None
        ledger.settle(ledger.charge(tenant, 100, 50), 100, 50)
        places.append(tenant)
    assert places.count("heavy") == pytest.approx(300, rel=0.01)


def test_idle_time_earns_nothing_and_idle_capacity_costs_nothing() -> None:
    ledger = TenantLedger()
    ledger.begin_waiting("busy")
    for _ in range(100):
        ledger.charge("busy", 1000, 0)
    # The idle tenant had no request all the while, and does not catch up.
    ledger.begin_waiting("idle")
    turns = []
    for _ in range(6):
        tenant = ledger.first()
        assert tenant is not None
        turns.append(tenant)
        ledger.charge(tenant, 1000, 0)
    assert turns.count("idle") == turns.count("busy") == 3
    ledger.end_waiting("idle")
    ledger.end_waiting("busy")
    # Alone, it uses capacity that nobody wants; then it is not behind a new one.
    for _ in range(50):
        ledger.charge("busy", 1000, 0)
    running = ledger.charge("busy", 1000, 0)
    ledger.begin_waiting("new")
    assert ledger.first() == "new"
    # A request from before that ends now costs what it has cost, and brings back nothing else.
    ledger.settle(running, 1000, 0)
    ledger.begin_waiting("busy")
    ledger.charge("new", 1, 0)
    assert ledger.first() == "busy"


@pytest.mark.parametrize("waits", [True, False])
def test_a_tenant_that_has_had_less_gets_a_burst_and_no_more(waits: bool) -> None:
    """Its requests wait, or get nodes as soon as they come."""
    ledger = TenantLedger()
    for tenant in ("modest", "busy"):
        ledger.begin_waiting(tenant)
    ledger.charge("modest", 100, 0)
    ledger.end_waiting("modest")
    for _ in range(100):
        ledger.charge("busy", 100, 0)
    if waits:
        ledger.begin_waiting("modest")
    count = 0
    while ledger.is_first("modest"):
        count += 1
        assert count < 10
        ledger.charge("modest", 100, 0)
    assert count == 4
    assert not ledger.is_first("new")
    ledger.charge("busy", 100, 0)
    assert ledger.is_first("modest"), "it is beside the others"


def test_a_tenant_with_one_request_at_a_time_pays_for_each() -> None:
    ledger = TenantLedger()
    ledger.begin_waiting("small")
    ledger.begin_waiting("big")
    places = []
    for _ in range(500):
        tenant = ledger.first()
        assert tenant is not None
        places.append(tenant)
        ledger.charge(tenant, 100_000 if tenant == "big" else 1_000, 0)
        if tenant == "big":
            ledger.end_waiting("big")
            ledger.begin_waiting("big")
    assert places.count("big") <= 6


def test_nothing_is_given_back_of_what_was_forgiven() -> None:
    ledger = TenantLedger()
    charge = ledger.charge("chat", 16_000, 0)
    ledger.begin_waiting("other")
    ledger.begin_waiting("chat")
    assert ledger.lag("chat") == 0.0, "it was alone when it was charged"
    ledger.settle(charge, 0, 0)
    assert ledger.lag("chat") == 0.0
    later = ledger.charge("chat", 16_000, 0)
    ledger.settle(later, 1_000, 0)
    assert ledger.lag("chat") == 1_000.0, "but all of what was not"


def test_a_refund_is_of_the_charge_and_nothing_else() -> None:
    ledger = TenantLedger()
    ledger.charge("a", 5000, 0)
    ledger.begin_waiting("other")
    ledger.end_waiting("other")
    # Nobody waits. What the first charge has cost is forgiven before the second one, of which all comes back.
    ledger.settle(ledger.charge("a", 5000, 0), 0, 0)
    assert ledger.counter("a") == 0.0
    heavy = ledger.charge("b", 1000, 0)
    ledger.set_weight("b", 10.0)
    ledger.settle(heavy, 100, 0)
    assert ledger.counter("b") == 100.0, "charged at weight 1"


def test_a_charge_is_corrected_by_what_a_request_has_cost() -> None:
    ledger = TenantLedger()
    ledger.begin_waiting("a")
    ledger.begin_waiting("b")
    charge = ledger.charge("a", 100, 1000)
    assert charge.tokens == 100 + 2 * 128, "what a first request is expected to generate"
    assert ledger.charge("b", 100, 10).tokens == 120, "no more than it may"
    ledger.settle(charge, 5, 0)
    assert ledger.first() == "a", "most of its prompt was cached, and it was cancelled"
    assert ledger.lag("b") == 115


@given(st.integers(0, 1 << 30))
def test_the_first_is_always_the_waiting_one_with_the_lowest_counter(seed: int) -> None:
    rng, ledger, waiting = Random(seed), TenantLedger(), set[str]()
    for _ in range(200):
        tenant = f"t{rng.randrange(12)}"
        match rng.randrange(4):
            case 0 if tenant not in waiting:
                ledger.begin_waiting(tenant, rng.choice([1.0, 2.0]))
                waiting.add(tenant)
            case 1 if tenant in waiting:
                ledger.end_waiting(tenant)
                waiting.remove(tenant)
            case 2:
                ledger.settle(ledger.charge(tenant, rng.randrange(100), 50), rng.randrange(100), 20)
        first = ledger.first()
        assert (first is None) == (not waiting)
        if first is not None:
            assert ledger.lag(first) == min(ledger.lag(each) for each in waiting)
