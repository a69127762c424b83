"""State machines as transition tables over two enums, the states and the events.

The table is the specification. A (state, event) pair that is not in the table is illegal: it changes nothing and raises
`IllegalEvent`, whose message has the machine's history. Diagrams are rendered from the same table. The design follows
h11, where the protocol is a transition table, too.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Generic, TypeVar

S = TypeVar("S", bound=enum.Enum)
E = TypeVar("E", bound=enum.Enum)


class IllegalEvent(Exception):
    """An event that the machine's state does not accept; the machine is unchanged."""

    def __init__(self, name: str, state: enum.Enum, event: enum.Enum, history: str) -> None:
        super().__init__(f"{name}: {event.name} is illegal in {state.name} (so far: {history})")
        self.state = state
        self.event = event


class Machine(Generic[S, E]):
    """A state that changes by a transition table `{(state, event): next state}`."""

    def __init__(self, name: str, initial: S, table: Mapping[tuple[S, E], S]) -> None:
        """`name`: names the machine in errors."""
        self._name = name
        self._table = table
        self._state = initial
        self._history: list[str] = [initial.name]

    @property
    def state(self) -> S:
        return self._state

    @property
    def history(self) -> str:
        """Every state so far and the event that led to it."""
        return " ".join(self._history)

    def accepts(self, event: E) -> bool:
        """Whether the event is legal now."""
        return (self._state, event) in self._table

    def feed(self, event: E) -> S:
        """Take the transition and return the new state; raises IllegalEvent and changes nothing when there is none."""
        after = self._table.get((self._state, event))
        if after is None:
            raise IllegalEvent(self._name, self._state, event, self.history)
        if after is not self._state:
            self._history.append(f"-{event.name}-> {after.name}")
        self._state = after
        return after


def render_mermaid(initial: S, table: Mapping[tuple[S, E], S]) -> str:
    """The table as a Mermaid state diagram, one line per pair of states."""
    edges: dict[tuple[S, S], list[str]] = {}
    for (before, event), after in table.items():
        edges.setdefault((before, after), []).append(event.name.lower())
    lines = ["stateDiagram-v2", f"    [*] --> {initial.name}"]
    lines += [f"    {a.name} --> {b.name}: {', '.join(events)}" for (a, b), events in edges.items()]
    sources = {before for before, _ in table}
    final = {after for after in table.values() if after not in sources}
    lines += [f"    {state.name} --> [*]" for state in sorted(final, key=lambda s: s.name)]
    return "\n".join(lines)
