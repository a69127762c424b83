"""Conversations: each prompt is all that was said before and something new.

What the assistant said is named like everything else, so a conversation is the same tokens in every run, whatever the
model answers. So of its own answers a node's prefix cache finds none again: what is measured is no better than life.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from baton.bench.workloads.arrivals import Arrivals
from baton.bench.workloads.request import Piece, WorkloadRequest, unique_piece

_SAID, _ANSWERED = 1, 2


@dataclass(frozen=True, slots=True)
class MultiTurn:
    """Sessions arrive; their turns follow each other with a pause between answer and question."""

    arrivals: Arrivals
    """Of first turns."""
    sessions: int
    turns: int
    first_length: int
    """Tokens of the first question (with the system prompt)..."""
    turn_length: int
    """... and of each later one."""
    output_length: int
    think_s: float = 0.0
    """Mean of an exponential distribution."""
    seed: int = 0

    def __len__(self) -> int:
        return self.sessions * self.turns

    def __iter__(self) -> Iterator[WorkloadRequest]:
        """In the order of the sessions' arrival, each with all of its turns."""
        times = self.arrivals.times(self.sessions, np.random.default_rng((self.seed, 1)))
        rng = np.random.default_rng((self.seed, 2))
        for session in range(self.sessions):
            pauses = rng.exponential(self.think_s, self.turns) if self.think_s else np.zeros(self.turns)
            pieces: list[Piece] = []
            for turn in range(self.turns):
                length = self.turn_length if turn else self.first_length
                pieces.append(unique_piece(length, self.seed, _SAID, session, turn))
                yield WorkloadRequest(
                    session * self.turns + turn,
                    float(times[session]),
                    sum(piece.length for piece in pieces),
                    self.output_length,
                    tuple(pieces),
                    session,
                    turn,
                    float(pauses[turn]) if turn else 0.0,
                )
                pieces.append(unique_piece(self.output_length, self.seed, _ANSWERED, session, turn))

    def describe(self) -> dict[str, Any]:
        return {
            "dataset": "multi_turn",
            "sessions": self.sessions,
            "turns": self.turns,
            "first_length": self.first_length,
            "turn_length": self.turn_length,
            "output_length": self.output_length,
            "think_s": self.think_s,
            "request_rate": self.arrivals.rate if self.arrivals.rate != float("inf") else "inf",
            "seed": self.seed,
        }
