"""Every state machine goes where docs/states.md says, which is written down apart from the tables, and nowhere else.

For each machine every (state, event) pair is tried, in the state to which the shortest row of events leads.
"""

from __future__ import annotations

import enum
import itertools
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from baton.cli.cluster.supervisor.child import CHILD_TABLE, ChildEvent, ChildState
from baton.engine.request import ENDS_OF_ALL, REQUEST_TABLE, RequestEvent, RequestStatus
from baton.machine import IllegalEvent, Machine
from baton.messages.node import Outcome
from baton.node.adapters.adapter_cache import ADAPTER_TABLE, AdapterEvent, AdapterState
from baton.node.attempts.attempts import ATTEMPT_TABLE, AttemptEvent, AttemptState
from baton.node.lifecycle import NODE_TABLE, NodeEvent, NodeState
from kv_transfer.mover.merge_values import MERGE_TABLE, MergeEvent, MergeState
from kv_transfer.receiver.probe_values import PROBE_TABLE, ProbeEvent, ProbeState
from kv_transfer.receiver.transfer_values import TRANSFER_TABLE, TransferEvent, TransferState
from kv_transfer.sender.lease_values import LEASE_TABLE, LeaseEvent, LeaseState
from router.flight.flight_table import FLIGHT_TABLE, FlightState, FlightStep
from router.placement.breaker import BREAKER_TABLE, BreakerState, BreakerStep

Table = Mapping[Any, Any]
MACHINES: dict[str, tuple[Table, type[enum.Enum], list[enum.Enum]]] = {
    "request": (REQUEST_TABLE, RequestStatus, [*RequestEvent, *Outcome]),
    "flight": (FLIGHT_TABLE, FlightState, [*FlightStep]),
    "breaker": (BREAKER_TABLE, BreakerState, [*BreakerStep]),
    "attempt": (ATTEMPT_TABLE, AttemptState, [*AttemptEvent]),
    "lease": (LEASE_TABLE, LeaseState, [*LeaseEvent]),
    "probe": (PROBE_TABLE, ProbeState, [*ProbeEvent]),
    "transfer": (TRANSFER_TABLE, TransferState, [*TransferEvent]),
    "divided_read": (MERGE_TABLE, MergeState, [*MergeEvent]),
    "adapter": (ADAPTER_TABLE, AdapterState, [*AdapterEvent]),
    "node": (NODE_TABLE, NodeState, [*NodeEvent]),
    "child": (CHILD_TABLE, ChildState, [*ChildEvent]),
}
PAGE = (Path(__file__).parents[3] / "docs/states.md").read_text(encoding="utf-8")


def diagram(name: str) -> str:
    drawing = re.search(rf"<!-- diagram: {name} -->\n(.*?)<!-- end -->", PAGE, re.DOTALL)
    assert drawing is not None
    return drawing[1]


@cache
def drawn(name: str) -> dict[tuple[str, str], str]:
    """The state after each (state, event), by their names in the diagram."""
    arrows = re.findall(r"^ +(\w+) --> (\w+): (.*)$", diagram(name), re.MULTILINE)
    after = {(before, event.upper()): after for before, after, events in arrows for event in events.split(", ")}
    if name == "request":
        # The page says so in words.
        live = [status.name for status in RequestStatus if status is not RequestStatus.ENDED]
        after |= {(status, outcome.name): "ENDED" for status, outcome in itertools.product(live, ENDS_OF_ALL)}
    return after


@cache
def roads(name: str) -> dict[str, list[enum.Enum]]:
    """The shortest row of events to each state, from the one where the diagram begins."""
    table, _, _ = MACHINES[name]
    (first,) = re.findall(r"\[\*\] --> (\w+)", diagram(name))
    ways: dict[str, list[enum.Enum]] = {first: []}
    for state in (reached := [first]):
        for (before, event), after in table.items():
            if before.name == state and after.name not in ways:
                ways[after.name] = [*ways[state], event]
                reached.append(after.name)
    return ways


PAIRS = [(name, state, event) for name, (_, states, events) in MACHINES.items() for state in states for event in events]


@pytest.mark.parametrize(("name", "state", "event"), PAIRS, ids=lambda value: getattr(value, "name", value))
def test_a_machine_moves_as_its_diagram_says_or_changes_nothing(name: str, state: enum.Enum, event: enum.Enum) -> None:
    table, _, _ = MACHINES[name]
    ways = roads(name)
    machine = Machine(name, type(state)[next(iter(ways))], table)
    for earlier in ways[state.name]:
        machine.feed(earlier)
    assert machine.state is state
    after, story = drawn(name).get((state.name, event.name)), machine.history
    assert machine.accepts(event) == (after is not None)
    if after is None:
        with pytest.raises(IllegalEvent, match=rf"{name}: {event.name} is illegal in {state.name}"):
            machine.feed(event)
        assert (machine.state, machine.history) == (state, story)
    else:
        assert machine.feed(event).name == machine.state.name == after


def test_every_diagram_has_its_machine_here() -> None:
    assert sorted(re.findall(r"<!-- diagram: (\w+) -->", PAGE)) == sorted(MACHINES)
