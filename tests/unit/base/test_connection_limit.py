"""Which connections a process accepts when it can not have more."""

from __future__ import annotations

from functools import partial

import pytest

from baton.security.connection_limit import MAX_CONNECTIONS, MAX_SILENT, ConnectionLimit, Limits, Place, Refusal


def taken(found: Place | Refusal) -> Place:
    assert isinstance(found, Place)
    return found


def test_each_limit_is_enforced_and_counted() -> None:
    limit = ConnectionLimit(Limits(process=5, listener=4, peer=2))
    a = [taken(limit.take("http", "a")) for _ in range(2)]
    assert limit.take("http", "a") is Refusal.PEER
    b = [taken(limit.take("http", "b")) for _ in range(2)]
    assert limit.take("http", "c") is Refusal.LISTENER
    taken(limit.take("grpc", "a"))
    assert limit.take("grpc", "b") is Refusal.PROCESS
    assert limit.num_open == 5
    b[0].release()
    b[0].release()
    assert limit.num_open == 4
    assert limit.take("http", "a") is Refusal.PEER
    a[0].release()
    taken(limit.take("http", "a"))
    assert limit.refused == {
        ("http", Refusal.PEER): 2,
        ("http", Refusal.LISTENER): 1,
        ("grpc", Refusal.PROCESS): 1,
    }


def test_the_longest_silent_connection_makes_room_for_a_new_one() -> None:
    limit, closed = ConnectionLimit(Limits(process=9, listener=9, peer=9, silent=2)), list[int]()
    places = [taken(limit.take("http", "a")) for _ in range(5)]
    for number in (0, 1):
        places[number].waits_for_peer(partial(closed.append, number))
        assert limit.pop_crowded_out("http") is None
    # Its peer has spoken, and then it is to speak again: it is the latest one now.
    places[0].waits_for_us()
    places[0].waits_for_peer(partial(closed.append, 0))
    places[2].waits_for_peer(partial(closed.append, 2))
    close = limit.pop_crowded_out("http")
    assert close is not None
    close()
    assert closed == [1]
    assert limit.pop_crowded_out("http") is None
    assert limit.refused == {("http", Refusal.SILENT): 1}
    # Still there until its connection is gone.
    assert limit.num_open == 5


def test_connections_with_a_request_or_closed_ones_are_not_silent() -> None:
    limit, closed = ConnectionLimit(Limits(process=9, listener=9, peer=9, silent=1)), list[str]()
    asked, left, gone, new = (taken(limit.take("http", "a")) for _ in range(4))
    asked.waits_for_peer(partial(closed.append, "asked"))
    asked.asked()
    asked.waits_for_peer(partial(closed.append, "asked"))
    left.waits_for_peer(partial(closed.append, "left"))
    left.release()
    gone.release()
    gone.waits_for_peer(partial(closed.append, "gone"))
    new.waits_for_peer(partial(closed.append, "new"))
    assert limit.pop_crowded_out("http") is None
    assert limit.num_silent == 1


def test_addresses_without_connections_are_forgotten() -> None:
    limit = ConnectionLimit(Limits(process=2, listener=2, peer=1))
    for number in range(1000):
        taken(limit.take("http", str(number))).release()
    assert limit.num_open == 0
    assert not limit._by_peer


@pytest.mark.parametrize("descriptors", [64, 256, 1024, 20_000, 1 << 20])
def test_limits_leave_descriptors_for_the_process_and_connections_for_other_peers(descriptors: int) -> None:
    limits = Limits.of_descriptors(descriptors)
    assert limits.peer < limits.listener < limits.process <= min(descriptors // 2, MAX_CONNECTIONS)
    assert 0 < limits.silent <= min(MAX_SILENT, limits.process // 4)
