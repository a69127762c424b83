"""What the table of leases must never allow. That it goes where its diagram says is in tests/unit/base."""

from __future__ import annotations

from kv_transfer.sender.lease_values import FINAL, HELD, LEASE_TABLE, LeaseEvent, LeaseState

S, E = LeaseState, LeaseEvent


def test_final_states_are_final_and_a_possible_reader_is_never_skipped() -> None:
    assert not any(state in FINAL for state, _ in LEASE_TABLE)
    may_be_read = (S.READING, S.SUSPECT)
    ends_the_lease = {
        event for (state, event), after in LEASE_TABLE.items() if state in may_be_read and after not in HELD
    }
    told_by_the_reader = {E.CONFIRM, E.CONFIRM_UNDIGESTED, E.ABANDON}
    assert ends_the_lease == told_by_the_reader | {E.READER_GONE, E.GRACE_OVER, E.GRACE_OVER_READING}


def test_only_a_granted_lease_is_subscribed_to_and_only_a_lease_that_is_out_ends_unread() -> None:
    into_reading = {state for (state, _), after in LEASE_TABLE.items() if after is S.READING and state is not S.READING}
    assert into_reading == {S.GRANTED}
    into_expired = {state for (state, _), after in LEASE_TABLE.items() if after is S.EXPIRED}
    assert into_expired == {S.GRANTED}
