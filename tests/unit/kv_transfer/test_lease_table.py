"""An attempt on its sender goes where its table says, and nowhere else."""

from __future__ import annotations

from baton.machine import Machine, render_mermaid
from kv_transfer.sender.lease_values import FINAL, HELD, LEASE_TABLE, LeaseEvent, LeaseState
from tests.support.transitions import check_pair, every_pair

S, E = LeaseState, LeaseEvent

EXPECTED: dict[LeaseState, dict[str, LeaseState]] = {
    S.UNKNOWN: {
        "EXPECT": S.EXPECTED,
        "SUBSCRIBE": S.EXPECTED,
        "BEGIN": S.COMPUTING,
        "OFFER": S.GRANTED,
        "WITHDRAW": S.CANCELLED,
        "ABANDON_READING": S.OVERRUN,
    },
    S.EXPECTED: {
        "EXPECT": S.EXPECTED,
        "SUBSCRIBE": S.EXPECTED,
        "READERS_LOST": S.UNKNOWN,
        "BEGIN": S.COMPUTING,
        "OFFER": S.GRANTED,
        "WITHDRAW": S.CANCELLED,
    },
    S.COMPUTING: {
        "EXPECT": S.COMPUTING,
        "SUBSCRIBE": S.COMPUTING,
        "OFFER": S.GRANTED,
        "WITHDRAW": S.CANCELLED,
        "END": S.EXPECTED,
    },
    S.GRANTED: {
        "EXPECT": S.GRANTED,
        "SUBSCRIBE": S.READING,
        "OFFER": S.GRANTED,
        "WITHDRAW": S.RELEASED,
        "DEADLINE": S.EXPIRED,
    },
    S.READING: {
        "OFFER": S.READING,
        "WITHDRAW": S.SUSPECT,
        "CONFIRM": S.RELEASED,
        "CONFIRM_UNDIGESTED": S.AWAITING_DIGESTS,
        "ABANDON": S.RELEASED,
        "ABANDON_READING": S.SUSPECT,
        "LINK_LOST": S.SUSPECT,
        "READER_GONE": S.RELEASED,
        "DEADLINE": S.SUSPECT,
    },
    S.SUSPECT: {
        "OFFER": S.SUSPECT,
        "WITHDRAW": S.SUSPECT,
        "CONFIRM": S.RELEASED,
        "CONFIRM_UNDIGESTED": S.AWAITING_DIGESTS,
        "ABANDON": S.RELEASED,
        "ABANDON_READING": S.SUSPECT,
        "LINK_LOST": S.SUSPECT,
        "READER_GONE": S.RELEASED,
        "GRACE_OVER": S.RELEASED,
        "GRACE_OVER_READING": S.OVERRUN,
    },
    S.AWAITING_DIGESTS: {"DIGESTED": S.RELEASED, "DIGESTS_LOST": S.RELEASED, "LINK_LOST": S.RELEASED},
    S.OVERRUN: {"ABANDON": S.RELEASED, "ABANDON_READING": S.OVERRUN, "LINK_LOST": S.RELEASED},
}
ROADS: dict[LeaseState, list[LeaseEvent]] = {
    S.UNKNOWN: [],
    S.EXPECTED: [E.EXPECT],
    S.COMPUTING: [E.EXPECT, E.BEGIN],
    S.GRANTED: [E.BEGIN, E.OFFER],
    S.READING: [E.OFFER, E.SUBSCRIBE],
    S.SUSPECT: [E.OFFER, E.SUBSCRIBE, E.LINK_LOST],
    S.AWAITING_DIGESTS: [E.OFFER, E.SUBSCRIBE, E.CONFIRM_UNDIGESTED],
    S.OVERRUN: [E.OFFER, E.SUBSCRIBE, E.DEADLINE, E.GRACE_OVER_READING],
    S.RELEASED: [E.OFFER, E.SUBSCRIBE, E.CONFIRM],
    S.EXPIRED: [E.OFFER, E.DEADLINE],
    S.CANCELLED: [E.BEGIN, E.WITHDRAW],
}


def machine_in(state: LeaseState) -> Machine[LeaseState, LeaseEvent]:
    machine = Machine("lease", S.UNKNOWN, LEASE_TABLE)
    for event in ROADS[state]:
        machine.feed(event)
    assert machine.state is state
    return machine


@every_pair(S, E)
def test_every_pair_moves_as_written_here_or_changes_nothing(state: LeaseState, event: LeaseEvent) -> None:
    machine = machine_in(state)
    expected = EXPECTED.get(state, {})
    assert machine.accepts(event) == (event.name in expected)
    check_pair(machine.feed, lambda: machine.state, event, expected, rf"lease: {event.name} is illegal in {state.name}")


def test_final_states_are_final_and_a_possible_reader_is_never_skipped() -> None:
    assert not any(state in FINAL for state, _ in LEASE_TABLE)
    may_be_read = (S.READING, S.SUSPECT)
    ends_the_lease = {
        event for (state, event), after in LEASE_TABLE.items() if state in may_be_read and after not in HELD
    }
    told_by_the_reader = {E.CONFIRM, E.CONFIRM_UNDIGESTED, E.ABANDON}
    assert ends_the_lease == told_by_the_reader | {E.READER_GONE, E.GRACE_OVER, E.GRACE_OVER_READING}
    assert "SUSPECT --> RELEASED" in render_mermaid(S.UNKNOWN, LEASE_TABLE)


def test_only_a_granted_lease_is_subscribed_to_and_only_a_lease_that_is_out_ends_unread() -> None:
    into_reading = {state for (state, _), after in LEASE_TABLE.items() if after is S.READING and state is not S.READING}
    assert into_reading == {S.GRANTED}
    into_expired = {state for (state, _), after in LEASE_TABLE.items() if after is S.EXPIRED}
    assert into_expired == {S.GRANTED}
