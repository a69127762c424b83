"""Classes and weights in the router's queue: urgent requests have no more than their share, tenants what they weigh."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.admission.admission import NO_TARGETS, AdmissionQueue, Ticket
from router.admission.service_class import ServiceClass

URGENT, NORMAL, BATCH = ServiceClass
MOST_TOKENS = 1000


class Desk:
    """A queue in which the same senders always have requests, served one after the other."""

    def __init__(self, urgent_share: float = 0.5, max_waiting: int = 100, seed: int = 1) -> None:
        self.rng = Random(seed)
        self.queue: AdmissionQueue[str] = AdmissionQueue(max_waiting, 60.0, self.rng, 2.0, urgent_share)
        self.tokens: Counter[str] = Counter()
        self.weights: dict[str, float] = {}

    def ticket(self, tenant: str, service_class: ServiceClass = NORMAL, weight: float = 1.0) -> Ticket[str]:
        return self.queue.ticket(tenant, 0.0, 0, NO_TARGETS, tenant=tenant, service_class=service_class, weight=weight)

    def put(self, tenant: str, service_class: ServiceClass = NORMAL, weight: float = 1.0, count: int = 1) -> list[str]:
        """Queue requests; return whose gave way to them."""
        self.weights[tenant] = weight
        added = [self.queue.add(self.ticket(tenant, service_class, weight), 0.0, 1) for _ in range(count)]
        return [each.tenant for each in added if each is not None]

    def serve(self, count: int) -> list[str]:
        """Serve so many requests, each of which is followed by another one of its tenant."""
        served = []
        for _ in range(count):
            first = self.queue.first()
            assert first is not None
            assert self.queue.is_next(first)
            self.queue.remove(first)
            cost = self.rng.randint(1, MOST_TOKENS)
            charge = self.queue.ledger(first.service_class).charge(first.tenant, cost, 0)
            self.queue.urgent.placed(first.service_class, charge.tokens)
            self.tokens[first.tenant] += cost
            self.queue.put_back(self.ticket(first.tenant, first.service_class, self.weights[first.tenant]))
            served.append(first.tenant)
        return served


@given(share=st.sampled_from([0.1, 0.5, 0.75, 0.95]), seed=st.integers(0, 2**16), count=st.integers(1, 300))
def test_urgent_requests_get_their_share_of_the_tokens_while_normal_ones_wait(
    share: float, seed: int, count: int
) -> None:
    desk = Desk(share, seed=seed)
    desk.put("urgent", URGENT, count=3)
    desk.put("normal", NORMAL, count=3)
    desk.put("batch", BATCH)
    served = desk.serve(count)
    assert abs(desk.tokens["urgent"] - share * desk.tokens.total()) <= MOST_TOKENS
    assert served[0] == "urgent"
    assert not desk.tokens["batch"]


def test_with_a_share_of_one_urgent_requests_come_before_all_others() -> None:
    desk = Desk(1.0)
    desk.put("urgent", URGENT)
    desk.put("normal")
    assert set(desk.serve(50)) == {"urgent"}


def test_what_urgent_requests_get_while_nobody_waits_is_not_held_against_them() -> None:
    desk = Desk()
    desk.put("urgent", URGENT)
    desk.serve(50)
    desk.put("normal")
    assert desk.serve(1) == ["urgent"]


def test_a_newcomer_is_next_if_urgent_ones_have_had_their_share() -> None:
    desk = Desk()
    desk.put("urgent", URGENT, count=2)
    normal = desk.ticket("normal")
    assert not desk.queue.is_next(normal)
    desk.queue.put_back(normal)
    desk.serve(1)
    desk.queue.remove(normal)
    assert desk.queue.is_next(normal)
    assert desk.queue.is_next(desk.ticket("urgent", URGENT)) is False, "it comes behind its own ones"


def test_of_a_full_queue_urgent_requests_hold_their_share_and_normal_ones_the_rest() -> None:
    desk = Desk(max_waiting=10)
    desk.put("normal", count=10)
    assert desk.put("urgent", URGENT, count=5) == ["normal"] * 5
    assert desk.put("another", URGENT, count=2) == ["urgent"] * 2, "no further one of the normal ones"
    flooded = Desk(max_waiting=10)
    flooded.put("urgent", URGENT, count=10)
    assert flooded.put("normal", count=5) == ["urgent"] * 5
    batch = Desk(max_waiting=10)
    batch.put("batch", BATCH, count=3)
    batch.put("urgent", URGENT, count=7)
    assert batch.put("urgent", URGENT, count=3) == ["batch"] * 3


def test_a_tenant_of_three_times_the_weight_gets_three_times_the_tokens() -> None:
    desk = Desk()
    desk.put("heavy", weight=3.0)
    desk.put("light", weight=1.0)
    assert desk.queue.ledger(NORMAL).waiting_weight == 4.0
    desk.put("heavy", weight=3.0, count=3)
    desk.put("light", weight=1.0, count=3)
    desk.serve(3000)
    assert desk.tokens["heavy"] / desk.tokens["light"] == pytest.approx(3.0, rel=0.03)


def test_a_new_weight_holds_for_a_tenant_that_waits() -> None:
    desk = Desk()
    desk.put("heavy", weight=1.0)
    desk.put("light", weight=1.0)
    desk.serve(100)
    desk.put("heavy", weight=3.0)
    assert desk.queue.ledger(NORMAL).waiting_weight == 4.0
    desk.tokens.clear()
    desk.serve(3000)
    assert desk.tokens["heavy"] / desk.tokens["light"] == pytest.approx(3.0, rel=0.03)


def test_a_class_of_a_key_replaces_what_the_priority_says() -> None:
    assert ServiceClass.of(-1, -10, "batch") is BATCH
    assert ServiceClass.of(100, 100, "urgent") is URGENT
    assert ServiceClass.of(0, None, "") is NORMAL
