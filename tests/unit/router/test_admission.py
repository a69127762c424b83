"""The router's queue: order, limits, displaced requests, and predictions of lateness."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.errors import QueueFull, WouldBeLate
from router.admission.admission import AdmissionQueue, LatencyTargets, Ticket
from router.admission.service_class import ServiceClass

NO_TARGETS = LatencyTargets()


def queue(max_waiting: int = 8, ageing_s: float = 60.0) -> AdmissionQueue[str]:
    return AdmissionQueue(max_waiting, ageing_s, Random(1))


def put(
    waiting: AdmissionQueue[str],
    name: str,
    arrived: float = 0.0,
    priority: int = 0,
    targets: LatencyTargets = NO_TARGETS,
    *,
    is_retry: bool = False,
    num_running: int = 1,
    tenant: str = "",
    service_class: ServiceClass = ServiceClass.NORMAL,
) -> str | None:
    """Queue a request; return the name of the one that it displaced."""
    ticket = waiting.ticket(
        name, arrived, priority, targets, is_retry=is_retry, tenant=tenant, service_class=service_class
    )
    displaced = waiting.add(ticket, arrived, num_running)
    return None if displaced is None else displaced.item


def drained(waiting: AdmissionQueue[str]) -> str:
    names = ""
    while (ticket := waiting.first()) is not None:
        names += ticket.item
        waiting.remove(ticket)
    assert len(waiting) == 0
    return names


def test_requests_leave_the_queue_by_priority_then_arrival_and_priority_ages() -> None:
    waiting = queue()
    for name, arrived, priority in [("a", 0, 1), ("b", 1, 0), ("c", 2, 0), ("d", 3, -1), ("e", 61, 0), ("f", 59, 0)]:
        put(waiting, name, arrived, priority)
    assert drained(waiting) == "dbcfae"
    waiting = queue(ageing_s=0.0)
    for name, arrived, priority in [("a", 0, 1), ("b", 1000, 0), ("c", 2000, -1)]:
        put(waiting, name, arrived, priority)
    assert drained(waiting) == "cba"


def test_a_request_that_lost_its_nodes_comes_first_and_is_never_refused() -> None:
    waiting = queue(max_waiting=1)
    put(waiting, "a", 0, -9)
    put(waiting, "b", 5, 9, is_retry=True)
    put(waiting, "c", 4, 9, is_retry=True)
    assert len(waiting) == 3
    with pytest.raises(QueueFull):
        put(waiting, "d", 6, -9)
    assert drained(waiting) == "cba"


def test_a_full_queue_displaces_the_newest_request_of_the_lowest_priority() -> None:
    waiting = queue(max_waiting=3)
    for name, arrived, priority in [("a", 0, 2), ("b", 1, 2), ("c", 2, 0)]:
        put(waiting, name, arrived, priority)
    with pytest.raises(QueueFull, match="3 requests wait"):
        put(waiting, "d", 3, 2)
    with pytest.raises(QueueFull):
        waiting.check_room(2, 1)
    waiting.check_room(1, 1)
    assert put(waiting, "e", 4, 1) == "b"
    assert put(waiting, "f", 5, 0) == "a"
    assert put(waiting, "g", 6, 0) == "e"
    with pytest.raises(QueueFull):
        put(waiting, "h", 7, 0)
    assert drained(waiting) == "cfg"


def test_tenants_take_turns_and_each_keeps_its_own_order() -> None:
    waiting = queue(max_waiting=100)
    for number, name in enumerate("abcdef"):
        put(waiting, name, number, tenant="many")
    put(waiting, "x", 10, 1, tenant="few")
    put(waiting, "y", 11, 0, tenant="few")
    put(waiting, "r", 12, 9, is_retry=True, tenant="few")
    names = ""
    while (ticket := waiting.first()) is not None:
        assert waiting.is_next(ticket)
        names += ticket.item
        waiting.remove(ticket)
        if not ticket.is_retry:
            waiting.ledger(ServiceClass.NORMAL).charge(ticket.tenant, 10, 0)
    assert names == "raybxcdef"


def test_a_newcomer_is_next_if_its_tenant_has_had_less_than_all_that_wait() -> None:
    waiting = queue()
    put(waiting, "a", tenant="many")
    put(waiting, "b", 1, tenant="few")
    waiting.ledger(ServiceClass.NORMAL).charge("many", 100, 0)
    waiting.remove(waiting.ticket("not in it", 2, 0, NO_TARGETS, tenant="new"))
    assert not waiting.is_next(waiting.ticket("c", 2, 0, NO_TARGETS, tenant="new")), "it begins beside the first one"
    assert not waiting.is_next(waiting.ticket("d", 2, 0, NO_TARGETS, tenant="many"))
    assert waiting.is_next(waiting.ticket("e", 0, 0, NO_TARGETS, tenant="few")), "it comes before its own one"
    assert not waiting.is_next(waiting.ticket("f", 2, 0, NO_TARGETS, tenant="few"))


def test_a_full_queue_displaces_a_request_of_the_tenant_that_has_most_in_it() -> None:
    waiting = queue(max_waiting=4)
    for number, name in enumerate("abcd"):
        put(waiting, name, number, tenant="many")
    with pytest.raises(QueueFull):
        put(waiting, "e", 4, tenant="many")
    assert put(waiting, "x", 5, 9, tenant="few") == "d", "whatever the priorities"
    assert put(waiting, "y", 6, 9, tenant="few") == "c"
    with pytest.raises(QueueFull):
        put(waiting, "z", 7, 9, tenant="few")
    assert put(waiting, "u", 8, 8, tenant="few") == "y", "its own one that is less urgent"
    assert put(waiting, "v", 9, tenant="third") == "b"
    assert len(waiting) == 4


@given(st.integers(0, 1 << 30), st.integers(1, 12))
def test_of_the_tenant_with_most_requests_the_newest_gives_way(seed: int, max_waiting: int) -> None:
    rng, waiting, tickets = Random(seed), queue(max_waiting), list[Ticket[str]]()
    for number in range(60):
        if tickets and rng.random() < 0.3:
            waiting.remove(tickets.pop(rng.randrange(len(tickets))))
        lengths = Counter(ticket.tenant for ticket in tickets)
        newcomer = f"t{rng.randrange(6)}"
        ticket = waiting.ticket(str(number), float(number), 0, NO_TARGETS, tenant=newcomer)
        try:
            gave_way = waiting.add(ticket, 0.0, 1)
        except QueueFull:
            assert len(tickets) == max_waiting
            assert lengths[newcomer] + 1 >= max(lengths.values())
            continue
        tickets.append(ticket)
        assert (gave_way is not None) == (len(tickets) > max_waiting)
        if gave_way is not None:
            assert lengths[gave_way.tenant] == max(lengths.values()) > lengths[newcomer] + 1
            assert gave_way is [ticket for ticket in tickets if ticket.tenant == gave_way.tenant][-1]
            tickets.remove(gave_way)


def test_classes_come_one_after_the_other_and_the_last_one_gives_way() -> None:
    assert ServiceClass.of(100, 100) is ServiceClass.BATCH
    assert ServiceClass.of(-1, -10) is ServiceClass.URGENT
    assert {ServiceClass.of(0, -10), ServiceClass.of(5, None), ServiceClass.of(5, 0)} == {ServiceClass.NORMAL}
    waiting = queue(max_waiting=4)
    put(waiting, "b", 0, 100, tenant="nightly", service_class=ServiceClass.BATCH)
    put(waiting, "c", 1, 100, tenant="nightly", service_class=ServiceClass.BATCH)
    put(waiting, "n", 2, tenant="many")
    assert waiting.is_next(waiting.ticket("u", 3, -1, NO_TARGETS, tenant="desk", service_class=ServiceClass.URGENT))
    assert not waiting.is_next(waiting.ticket("d", 3, 0, NO_TARGETS, tenant="x", service_class=ServiceClass.BATCH))
    put(waiting, "u", 3, -1, tenant="desk", service_class=ServiceClass.URGENT)
    with pytest.raises(QueueFull):
        put(waiting, "e", 4, 100, tenant="nightly", service_class=ServiceClass.BATCH)
    assert put(waiting, "m", 5, 9, tenant="many") == "c"
    assert put(waiting, "v", 6, 9, tenant="few") == "b"
    with pytest.raises(QueueFull):
        put(waiting, "f", 7, 0, tenant="other", service_class=ServiceClass.BATCH)
    assert drained(waiting) == "unmv"


def test_a_tenant_is_told_how_long_its_own_requests_wait() -> None:
    waiting = queue(max_waiting=100)
    waiting.times.add(1.0, 10.0, 10)
    for number in range(20):
        put(waiting, str(number), number, tenant="many")
    # At 10 running each second has a departure, of which half are this tenant's once it waits.
    put(waiting, "a", 30, tenant="few", targets=LatencyTargets(first_token_by=30 + 2 + 1.0), num_running=10)
    with pytest.raises(WouldBeLate, match=r"predicted in 5\.000 s"):
        put(waiting, "b", 30, tenant="few", targets=LatencyTargets(first_token_by=30 + 4.9), num_running=10)
    assert max(waiting.retry_after_s(10, "few") for _ in range(20)) <= 1.25 * 4
    for number in range(20):
        put(waiting, "small", 31, tenant=f"t{number}")
    # All that wait, and it, are served in 4.2 s.
    assert max(waiting.retry_after_s(10, "many") for _ in range(20)) <= 1.25 * 42
    assert min(waiting.retry_after_s(10, "many") for _ in range(20)) >= 0.75 * 40


def test_a_queue_of_size_zero_refuses_every_request() -> None:
    with pytest.raises(QueueFull):
        put(queue(max_waiting=0), "a")


def test_a_new_request_is_next_only_if_none_is_ahead_of_it() -> None:
    waiting = queue()
    assert waiting.is_next(waiting.ticket("a", 0, 9, NO_TARGETS))
    put(waiting, "b", 0, 0)
    assert not waiting.is_next(waiting.ticket("c", 1, 0, NO_TARGETS))
    assert waiting.is_next(waiting.ticket("d", 1, -1, NO_TARGETS))


def test_a_request_predicted_to_be_late_is_refused_only_by_measured_times() -> None:
    waiting = queue()
    put(waiting, "first", targets=LatencyTargets(deadline=0.1, first_token_by=0.1))
    waiting.times.add(first_token_s=1.0, service_s=5.0, num_tokens=5)
    waiting.times.add(first_token_s=0.5, service_s=3.0, num_tokens=6)
    # One is ahead: two more departures at 2 running / 4 s, then half a second (the quickest) to the first token.
    put(waiting, "a", targets=LatencyTargets(first_token_by=4.5 + 1e-9), num_running=2)
    with pytest.raises(WouldBeLate, match=r"its first token is predicted in 6\.500 s"):
        put(waiting, "b", targets=LatencyTargets(first_token_by=6.4), num_running=2)
    # Its end: four more tokens at the quickest pace, half a second each.
    put(waiting, "c", targets=LatencyTargets(deadline=8.5 + 1e-9, least_tokens=5), num_running=2)
    with pytest.raises(WouldBeLate, match="its end is predicted"):
        put(waiting, "d", targets=LatencyTargets(deadline=10.4, least_tokens=5), num_running=2)
    assert drained(waiting) == "firstac"


def test_refused_clients_retry_after_the_queue_has_drained_with_jitter() -> None:
    waiting = queue(max_waiting=100)
    assert 0.75 <= waiting.retry_after_s(0) <= 1.25, "nothing is known"
    waiting.times.add(1.0, 10.0, 10)
    for number in range(9):
        put(waiting, str(number))
    said = [waiting.retry_after_s(5) for _ in range(50)]
    assert all(15.0 <= seconds <= 25.0 for seconds in said)
    assert len(set(said)) == 50
    assert waiting.retry_after_s(1) <= 75.0, "bounded"


class QueueMachine(RuleBasedStateMachine):
    """Random operations on the queue, compared with a list that is sorted for every query."""

    MAX = 5

    def __init__(self) -> None:
        super().__init__()
        self.waiting = queue(self.MAX, ageing_s=10.0)
        self.model: list[Ticket[str]] = []
        self.now = 0.0

    @rule(priority=st.integers(-2, 2), later=st.sampled_from([0.0, 1.0, 15.0]), is_retry=st.booleans())
    def offer(self, priority: int, later: float, is_retry: bool) -> None:
        self.now += later
        newcomers = [ticket for ticket in self.model if not ticket.is_retry]
        worst = max(newcomers, key=lambda t: (t.priority, newcomers.index(t)), default=None)
        is_crowded = not is_retry and len(newcomers) >= self.MAX
        ticket = self.waiting.ticket("", self.now, priority, NO_TARGETS, is_retry=is_retry)
        if is_crowded and worst is not None and worst.priority <= priority:
            with pytest.raises(QueueFull):
                self.waiting.add(ticket, self.now, 1)
            return
        displaced = self.waiting.add(ticket, self.now, 1)
        assert displaced is (worst if is_crowded else None)
        self.model = [other for other in self.model if other is not displaced] + [ticket]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        gone = data.draw(st.sampled_from(self.model))
        self.waiting.remove(gone)
        self.waiting.remove(gone)
        self.model.remove(gone)

    @invariant()
    def the_first_is_the_best(self) -> None:
        assert len(self.waiting) == len(self.model)
        best = sorted(self.model, key=lambda t: (not t.is_retry, t.arrived + 10.0 * t.priority, t.arrived))
        first = self.waiting.first()
        assert first is (best[0] if best else None)


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(max_examples=60, stateful_step_count=25)
