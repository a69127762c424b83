"""What one node computed and moved during a run, step by step.

A node says with its own clock what it did, and what that clock shows now. So a step has an age when the answer comes,
and its place on the harness's clock is that much before the answer: off by the answer's way at most, of which the
fastest one of a run is taken. Clocks of two nodes are never compared.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from baton.messages.ids import AttemptKey
from baton.messages.node import StepFigures
from baton.messages.node_report import NodeTrace, TraceEvent, TraceStep

_MOST_ROWS = 4000
"""More can't be told apart in a picture."""
_NEIGHBOURS_S = 0.002
"""Decode steps with no more between them are one stretch, where there are too many."""


@dataclass(frozen=True, slots=True)
class NodeStep:
    """One engine step, on the harness's clock."""

    ended_s: float
    figures: StepFigures
    goes_on: bool
    """There was more to compute when it had ended."""

    @property
    def began_s(self) -> float:
        return self.ended_s - self.figures.step_ms / 1e3

    @property
    def kind(self) -> str:
        if not self.figures.prefill_tokens:
            return "decode"
        return "mixed" if self.figures.decode_sequences else "prefill"

    @property
    def tokens(self) -> int:
        return self.figures.prefill_tokens + self.figures.decode_sequences


@dataclass(frozen=True, slots=True)
class Move:
    """One read of KV, on the harness's clock."""

    began_s: float
    ended_s: float
    num_bytes: int


class Interval(NamedTuple):
    """A step or a move, for a picture; `size`: its tokens or bytes."""

    begin_s: float
    end_s: float
    kind: str
    size: int


class NodeTimeline:
    """Grows with each answer of a node. All times in seconds."""

    def __init__(self) -> None:
        self.after = 0
        """The last event that is known..."""
        self.steps_after = 0
        """... and the last step."""
        self._behind_s = float("inf")
        """How far the node's clock is behind the harness's, at most."""
        self._new_steps: list[TraceStep] = []
        self._new_events: list[TraceEvent] = []
        self._steps: list[NodeStep] = []
        self._moves: list[Move] = []

    def skip(self, trace: NodeTrace) -> None:
        """That was before the run."""
        self.after = trace.events[-1].seq if trace.events else self.after
        self.steps_after = trace.steps[-1].seq if trace.steps else self.steps_after

    def add(self, received_s: float, trace: NodeTrace) -> None:
        """An answer, and when it was here."""
        self._behind_s = min(self._behind_s, received_s - trace.monotonic_ns / 1e9)
        self._new_steps += trace.steps
        self._new_events += trace.events
        self.skip(trace)

    def restart(self) -> None:
        """What comes now is another incarnation's, maybe of another host: its numbers begin anew."""
        self._settle()
        self.after = self.steps_after = 0
        self._behind_s = float("inf")

    @property
    def steps(self) -> Sequence[NodeStep]:
        self._settle()
        return self._steps

    @property
    def moves(self) -> Sequence[Move]:
        self._settle()
        return self._moves

    def busy(self, began_s: float, ended_s: float) -> dict[str, float]:
        """The share of that time that went into each kind of step."""
        shares: dict[str, float] = {}
        for step in self.steps:
            inside_s = min(step.ended_s, ended_s) - max(step.began_s, began_s)
            if inside_s > 0:
                shares[step.kind] = shares.get(step.kind, 0.0) + inside_s / (ended_s - began_s)
        return shares

    def rows(self, origin_s: float) -> list[list[Any]]:
        """For a result file: [start_s, end_s, kind, tokens or bytes], with times from `origin_s` on."""
        steps = [Interval(step.began_s, step.ended_s, step.kind, step.tokens) for step in self.steps]
        moves = [Interval(move.began_s, move.ended_s, "transfer", move.num_bytes) for move in self.moves]
        if len(steps) > _MOST_ROWS:
            steps = stretches(steps)
        return [
            [round(one.begin_s - origin_s, 6), round(one.end_s - origin_s, 6), one.kind, one.size]
            for one in sorted([*steps, *moves])
        ]

    def _settle(self) -> None:
        """Give what was heard its place on the harness's clock."""
        self._steps += [
            NodeStep(one.monotonic_ns / 1e9 + self._behind_s, one.figures, one.goes_on) for one in self._new_steps
        ]
        self._moves += moves_of(self._new_events, self._behind_s)
        self._new_steps, self._new_events = [], []


def moves_of(events: Iterable[TraceEvent], behind_s: float) -> list[Move]:
    """Reads, from their begin to their end; those of one attempt end in their order."""
    begun: defaultdict[AttemptKey, deque[float]] = defaultdict(deque)
    moves = []
    for event in events:
        when_s = event.monotonic_ns / 1e9 + behind_s
        if event.name == "read_started":
            begun[event.attempt].append(when_s)
        elif event.name == "read_done" and begun[event.attempt]:
            moves.append(Move(begun[event.attempt].popleft(), when_s, event.value))
    return moves


def stretches(steps: Sequence[Interval]) -> list[Interval]:
    """Steps that only decode, together while one follows the other at once."""
    joined: list[Interval] = []
    for step in steps:
        before = joined[-1] if joined else None
        if before and before.kind == step.kind == "decode" and step.begin_s - before.end_s <= _NEIGHBOURS_S:
            joined[-1] = before._replace(end_s=step.end_s, size=before.size + step.size)
        else:
            joined.append(step)
    return joined
