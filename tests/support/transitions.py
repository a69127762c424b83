"""Helpers for the tests of transition tables, which walk every (state, event) pair."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Mapping
from typing import TypeVar

import pytest

from baton.machine import IllegalEvent

S = TypeVar("S", bound=enum.Enum)
E = TypeVar("E", bound=enum.Enum)


def every_pair(states: type[S], events: type[E]) -> pytest.MarkDecorator:
    """Parametrize a test with each pair of `state` and `event`."""
    pairs = list(itertools.product(states, events))
    return pytest.mark.parametrize(("state", "event"), pairs, ids=lambda one: one.name)


def row(table: Mapping[tuple[S, E], S], state: S) -> dict[str, S]:
    """Return the state after each event that is legal in `state`, by the name of the event."""
    return {event.name: after for (before, event), after in table.items() if before is state}


def check_pair(
    feed: Callable[[E], S], state: Callable[[], S], event: E, expected: Mapping[str, S], illegal: str = "is illegal in"
) -> None:
    """Feed one event. `expected`: by the name of each legal event, the state that it leads to.

    Any other event raises IllegalEvent with a message that matches `illegal`, and the state stays.
    """
    before, after = state(), expected.get(event.name)
    if after is None:
        with pytest.raises(IllegalEvent, match=illegal):
            feed(event)
        assert state() is before
    else:
        assert feed(event) is after
        assert state() is after
