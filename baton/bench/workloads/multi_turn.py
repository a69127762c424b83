"""Conversations: each prompt is the whole conversation so far and a new question.

The assistant's answers in prompts are synthetic tokens too, so a conversation is the same in every run, whatever the
model answers. Therefore a node's prefix cache never finds its own answers again, and what is measured is not better
than in production.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from baton.bench.workloads.arrivals import Arrivals
from baton.bench.workloads.request import Piece, WorkloadRequest, unique_piece

_QUESTION, _ANSWER = 1, 2


@dataclass(frozen=True, slots=True)
class MultiTurn:
    """Sessions of several turns, with a pause between an answer and the next question."""

    arrivals: Arrivals
    """Arrivals of the first turns."""
    sessions: int
    turns: int
    first_length: int
    """Tokens of the first question, with the system prompt."""
    turn_length: int
    """Tokens of each later question."""
    output_length: int
    think_s: float = 0.0
    """Mean pause before a later question; pauses are exponentially distributed."""
    seed: int = 0

    def __len__(self) -> int:
        return self.sessions * self.turns

    def __iter__(self) -> Iterator[WorkloadRequest]:
        """Yields the sessions in the order of their arrival, each with all of its turns."""
        times = self.arrivals.times(self.sessions, np.random.default_rng((self.seed, 1)))
        rng = np.random.default_rng((self.seed, 2))
        for session in range(self.sessions):
            pauses = rng.exponential(self.think_s, self.turns) if self.think_s else np.zeros(self.turns)
            pieces: list[Piece] = []
            for turn in range(self.turns):
                length = self.turn_length if turn else self.first_length
                pieces.append(unique_piece(length, self.seed, _QUESTION, session, turn))
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
                pieces.append(unique_piece(self.output_length, self.seed, _ANSWER, session, turn))

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
