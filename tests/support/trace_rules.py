"""The rules that the events of an attempt keep, on one node and between nodes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from baton.messages.ids import AttemptKey
from baton.messages.node_report import TraceEvent

FOLLOWS = {
    "scheduled": "queued",
    "chunk_computed": "scheduled",
    "first_token": "scheduled",
    "remote_kv_arrived": "kv_arrived",
    "offered": "lease_granted",
    "closing_offered": "offered",
    "read_progress": "offered",
    "offer_received": "expected",
    "confirmed": "offer_received",
    "kv_arrived": "confirmed",
}
"""Events that come only after another event of the same attempt on the same node."""
ONCE = {"lease_granted", "closing_offered", "kv_arrived", "expected", "finished"}
COMPUTES = {"scheduled", "chunk_computed", "first_token", "preempted"}
"""Events that do not come after the sequence has finished."""


def broken_rules(logs: Mapping[str, Sequence[TraceEvent]]) -> list[str]:
    """The rules that the events of all incarnations break, each with its incarnation, attempt and event."""
    attempts = {incarnation: _by_attempt(events) for incarnation, events in logs.items()}
    found = [
        f"{incarnation} {attempt}: {broken}"
        for incarnation, of_node in attempts.items()
        for attempt, events in of_node.items()
        for broken in _broken_on_a_node(events)
    ]
    closed = {
        attempt
        for of_node in attempts.values()
        for attempt, events in of_node.items()
        if any(event.name == "closing_offered" for event in events)
    }
    for incarnation, of_node in attempts.items():
        for attempt, events in of_node.items():
            if any(event.name == "kv_arrived" for event in events) and attempt not in closed:
                found.append(f"{incarnation} {attempt}: its KV arrived, and nobody has offered all of it")
    return found


def _by_attempt(events: Sequence[TraceEvent]) -> Mapping[AttemptKey, list[TraceEvent]]:
    found: defaultdict[AttemptKey, list[TraceEvent]] = defaultdict(list)
    for event in events:
        found[event.attempt].append(event)
    return found


def _broken_on_a_node(events: Sequence[TraceEvent]) -> Iterator[str]:
    seen: set[str] = set()
    finished: set[str] = set()
    for event in events:
        name, sequence = event.name, event.detail if event.detail.startswith("sequence") else ""
        if name in FOLLOWS and FOLLOWS[name] not in seen:
            yield f"{name} before {FOLLOWS[name]}"
        if name in ONCE and (name, sequence) in {(one, sequence) for one in seen & ONCE} and name != "finished":
            yield f"{name} twice"
        if sequence in finished and name in COMPUTES | {"finished"}:
            yield f"{name} after the end"
        if name == "finished":
            finished.add(sequence)
        seen.add(name)
