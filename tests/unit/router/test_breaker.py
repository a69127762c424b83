"""Circuit breakers of nodes that failed recently: the table, back-offs and probes."""

from __future__ import annotations

from baton.machine import Machine
from router.placement.breaker import BREAKER_TABLE, FAILURES, Breaker, Breakers, BreakerState, BreakerStep
from tests.support.transitions import check_pair, every_pair

CLOSED, OPEN, HALF_OPEN = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN


@every_pair(BreakerState, BreakerStep)
def test_every_pair_of_state_and_event_moves_as_listed(state: BreakerState, event: BreakerStep) -> None:
    machine = Machine("breaker", state, BREAKER_TABLE)
    expected: dict[BreakerState, dict[str, BreakerState]] = {
        CLOSED: {"FAILED": CLOSED, "FAILED_OFTEN": OPEN, "SUCCEEDED": CLOSED},
        OPEN: {"FAILED": OPEN, "SUCCEEDED": OPEN, "BACK_OFF_OVER": HALF_OPEN},
        HALF_OPEN: {"FAILED": OPEN, "SUCCEEDED": CLOSED},
    }
    check_pair(machine.feed, lambda: machine.state, event, expected[state])


def open_breaker(now: float = 0.0) -> Breaker:
    breaker = Breaker("n", FAILURES)
    for _ in range(FAILURES):
        breaker.failed(now)
    return breaker


def test_a_breaker_opens_only_after_consecutive_failures() -> None:
    breaker = Breaker("n", FAILURES)
    for _ in range(FAILURES - 1):
        breaker.failed(0)
    breaker.succeeded(0)
    for _ in range(FAILURES - 1):
        breaker.failed(0)
    assert breaker.allows(0)
    breaker.failed(0)
    assert (breaker.state(0), breaker.allows(0)) == (OPEN, False)


def test_one_probe_at_a_time_decides() -> None:
    breaker = open_breaker()
    assert not breaker.allows(0.99)
    assert (breaker.allows(1), breaker.state(1)) == (True, HALF_OPEN)
    breaker.chosen(1)
    assert not breaker.allows(1), "its probe is under way"
    breaker.succeeded(2)
    assert (breaker.state(2), breaker.allows(2), breaker.is_fresh) == (CLOSED, True, True)


def test_each_failed_probe_doubles_the_back_off_up_to_a_bound() -> None:
    breaker, now, waits = open_breaker(), 0.0, []
    for _ in range(9):
        started = now
        while not breaker.allows(now):
            now += 0.5
        waits.append(now - started)
        breaker.chosen(now)
        breaker.failed(now)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    breaker.state(now + 60)
    breaker.succeeded(now + 60)
    for _ in range(FAILURES):
        breaker.failed(now + 60)
    assert breaker.allows(now + 61), "it begins anew"


def test_results_of_earlier_requests_neither_close_nor_prolong_an_open_breaker() -> None:
    breaker = open_breaker()
    breaker.succeeded(0.5)
    breaker.failed(0.9)
    assert (breaker.allows(0.9), breaker.allows(1)) == (False, True)


def test_a_probe_without_a_result_times_out() -> None:
    breaker = open_breaker()
    breaker.state(1)
    breaker.chosen(1)
    assert (breaker.allows(30.9), breaker.allows(31)) == (False, True)


def test_only_nodes_with_recent_failures_have_a_breaker() -> None:
    breakers = Breakers[str](FAILURES)
    breakers.succeeded("a", 0)
    breakers.chosen("a", 0)
    assert (len(breakers), breakers.not_allowed(0), breakers.state("a", 0)) == (0, frozenset(), CLOSED)
    for _ in range(FAILURES):
        breakers.failed("b", 0)
    assert (breakers.not_allowed(0), breakers.num_open(0), breakers.state("b", 0)) == ({"b"}, 1, OPEN)
    assert not breakers.not_allowed(1)
    breakers.succeeded("b", 1)
    assert len(breakers) == 0
