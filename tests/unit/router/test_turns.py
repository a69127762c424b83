"""The turns of requests on nodes: by what their tenants have there."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.admission.turns import Turn, Turns

REQUEST_S = 2.0


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 900), st.floats(0, 1), st.booleans()), max_size=60))
def test_turns_of_a_tenant_keep_their_order_and_none_waits_for_longer_than_a_request(
    events: list[tuple[str, int, float, bool]],
) -> None:
    """A request of a tenant is placed some time after the last one, and then perhaps the first one ends."""
    turns, now, placed = Turns(), 0.0, list[Turn]()
    for tenant, amount, later_s, first_ends in events:
        now += later_s
        own = [turn.at for turn in placed if turn.tenant == tenant]
        turn = turns.place(tenant, float(amount), now, REQUEST_S)
        assert turn.at <= max([now + REQUEST_S * 1.001, *own])
        assert turn.at >= max([now, *own])
        assert own or turn.at == now, "a tenant with nothing on nodes waits for nobody"
        placed.append(turn)
        if first_ends:
            turns.end(placed.pop(0))
    for turn in placed:
        turns.end(turn)
    assert turns.place("a", 1.0, now, REQUEST_S).at == now, "nothing is left"


def test_a_turn_is_later_by_the_share_of_what_is_on_nodes_and_by_the_class() -> None:
    turns = Turns()
    most, _ = [turns.place(*of, 0.0, REQUEST_S) for of in (("flood", 300.0), ("light", 100.0))]
    assert turns.place("flood", 0.0, 10.0, REQUEST_S).at == 10.0 + 0.75 * REQUEST_S
    assert turns.place("light", 0.0, 10.0, REQUEST_S).at == 10.0 + 0.25 * REQUEST_S
    assert turns.place("urgent", 0.0, 10.0, REQUEST_S, delay=-1).at == 10.0 - REQUEST_S
    assert turns.place("batch", 0.0, 10.0, REQUEST_S, delay=1).at == 10.0 + REQUEST_S
    turns.end(most)
    assert turns.place("light", 0.0, 20.0, REQUEST_S).at == 20.0 + REQUEST_S, "all that is left is its own"


@pytest.mark.parametrize("delay", [-1, 0, 1])
def test_a_tenant_whose_requests_never_end_all_at_once_does_not_keep_an_old_delay(delay: int) -> None:
    turns = Turns()
    for _ in range(2):
        turns.place("a", 1.0, 0.0, 1000.0, delay)
    placed = [turns.place("a", 1.0, now, 2.0, delay).at for now in (5.0, 5.5, 6.0)]
    assert placed == [now + (1 + delay) * 2.0 for now in (5.0, 5.5, 6.0)]


@pytest.mark.parametrize(
    ("own", "others", "goes_ahead"),
    [
        ({}, {+1: {"normal": 9}}, True),
        ({"urgent": 9}, {}, False),
        ({"urgent": 5}, {+1: {"normal": 5}}, True),
        ({"urgent": 9}, {+1: {"normal": 1}}, False),
        ({}, {-1: {"flood": 9}}, False),
        ({"normal": 5}, {+1: {"batch": 5}}, True),
    ],
)
def test_what_other_classes_have_on_nodes_counts_by_how_much_later_their_turns_are(
    own: Mapping[str, int], others: Mapping[int, Mapping[str, int]], goes_ahead: bool
) -> None:
    classes = {later: Turns() for later in (0, *others)}
    for later, on_nodes in ((0, own), *others.items()):
        for name, amount in on_nodes.items():
            classes[later].place(name, float(amount), 0.0, REQUEST_S)
    found = classes[0].goes_ahead(next(iter(own), "new"), [(classes[later], later) for later in others])
    assert found is goes_ahead


@pytest.mark.parametrize(
    ("on_nodes", "tenant", "goes_ahead"),
    [
        ({}, "a", False),
        ({"a": 9}, "a", False),
        ({"a": 9}, "b", True),
        ({"flood": 9, "light": 1}, "light", True),
        ({"flood": 9, "light": 1}, "flood", False),
        ({"a": 4, "b": 5}, "a", False),
        (dict.fromkeys("abcdefgh", 1), "i", False),
    ],
)
def test_a_request_goes_ahead_where_others_have_nearly_all(
    on_nodes: Mapping[str, int], tenant: str, goes_ahead: bool
) -> None:
    turns = Turns()
    for name, amount in on_nodes.items():
        turns.place(name, float(amount), 0.0, REQUEST_S)
    assert turns.goes_ahead(tenant) is goes_ahead
