"""Every state machine goes where state_machines.txt says, which no script writes, and nowhere else.

For each machine every (state, event) pair is tried, in the state to which the shortest row of events leads. The
diagrams of docs/states.md are rendered from the tables, so they can not tell that a table is wrong.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from baton.cli.cluster.supervisor.child import CHILD_TABLE, ChildEvent, ChildState
from baton.engine.request import REQUEST_TABLE, RequestEvent, RequestStatus
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
from router.planner.moves import MOVE_TABLE, MoveEvent, MoveState
from router.planner.scaling import GROWTH_TABLE, GrowthEvent, GrowthState

Table = Mapping[Any, Any]
MACHINES: dict[str, tuple[Table, type[enum.Enum], list[enum.Enum]]] = {
    "request": (REQUEST_TABLE, RequestStatus, [*RequestEvent, *Outcome]),
    "flight": (FLIGHT_TABLE, FlightState, [*FlightStep]),
    "breaker": (BREAKER_TABLE, BreakerState, [*BreakerStep]),
    "move": (MOVE_TABLE, MoveState, [*MoveEvent]),
    "growth": (GROWTH_TABLE, GrowthState, [*GrowthEvent]),
    "attempt": (ATTEMPT_TABLE, AttemptState, [*AttemptEvent]),
    "lease": (LEASE_TABLE, LeaseState, [*LeaseEvent]),
    "probe": (PROBE_TABLE, ProbeState, [*ProbeEvent]),
    "transfer": (TRANSFER_TABLE, TransferState, [*TransferEvent]),
    "divided_read": (MERGE_TABLE, MergeState, [*MergeEvent]),
    "adapter": (ADAPTER_TABLE, AdapterState, [*AdapterEvent]),
    "node": (NODE_TABLE, NodeState, [*NodeEvent]),
    "child": (CHILD_TABLE, ChildState, [*ChildEvent]),
}
ARROWS = Path(__file__).with_name("state_machines.txt").read_text(encoding="utf-8")
PAGE = (Path(__file__).parents[3] / "docs/states.md").read_text(encoding="utf-8")


def arrows_of(name: str) -> str:
    """The lines under this machine's name."""
    lines = re.search(rf"^{name}\n((?: +.*\n)+)", ARROWS, re.MULTILINE)
    assert lines is not None
    return lines[1]


@cache
def written(name: str) -> dict[tuple[str, str], str]:
    """The state after each (state, event), by their names."""
    arrows = re.findall(r"^ +(\w+) --> (\w+): (.*)$", arrows_of(name), re.MULTILINE)
    return {(before, event.upper()): after for before, after, events in arrows for event in events.split(", ")}


@cache
def roads(name: str) -> dict[str, list[enum.Enum]]:
    """The shortest row of events to each state, from the one where the machine begins."""
    table, _, _ = MACHINES[name]
    (first,) = re.findall(r"\[\*\] --> (\w+)", arrows_of(name))
    ways: dict[str, list[enum.Enum]] = {first: []}
    for state in (reached := [first]):
        for (before, event), after in table.items():
            if before.name == state and after.name not in ways:
                ways[after.name] = [*ways[state], event]
                reached.append(after.name)
    return ways


STATES = [(name, state) for name, (_, states, _) in MACHINES.items() for state in states]


@pytest.mark.parametrize(("name", "state"), STATES, ids=lambda value: getattr(value, "name", value))
def test_a_machine_moves_as_its_arrows_say_or_changes_nothing(name: str, state: enum.Enum) -> None:
    table, states, events = MACHINES[name]
    ways = roads(name)
    for event in events:
        machine = Machine(name, states[next(iter(ways))], table)
        for earlier in ways[state.name]:
            machine.feed(earlier)
        assert machine.state is state
        after, story = written(name).get((state.name, event.name)), machine.history
        assert machine.accepts(event) == (after is not None), event
        if after is None:
            with pytest.raises(IllegalEvent, match=rf"{name}: {event.name} is illegal in {state.name}"):
                machine.feed(event)
            assert (machine.state, machine.history) == (state, story), event
        else:
            assert machine.feed(event).name == machine.state.name == after, event


@pytest.mark.parametrize("name", MACHINES)
def test_every_arrow_is_about_a_state_and_an_event_of_its_machine(name: str) -> None:
    _, states, events = MACHINES[name]
    assert written(name).keys() <= {(state.name, event.name) for state in states for event in events}


def test_every_diagram_has_its_machine_here() -> None:
    assert re.findall(r"^\w+$", ARROWS, re.MULTILINE) == re.findall(r"<!-- diagram: (\w+) -->", PAGE)
    assert sorted(re.findall(r"<!-- diagram: (\w+) -->", PAGE)) == sorted(MACHINES)
