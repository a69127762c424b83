"""One request of a workload, and what its prompt is made of.

A prompt is a sequence of pieces. A piece has a name and a length: the same name always stands for the same tokens, and
a shorter piece for the first tokens of a longer one of that name. So tokens are made only when they are needed, the
simulator, which needs only block keys, makes none, and prompts share what the trace says they share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from baton.values import value

_MASK = (1 << 64) - 1
_UNIQUE = 1 << 63
"""Bit in the names of pieces that are from no trace: a trace's hash ids are below it."""


class Piece(NamedTuple):
    """A named part of a prompt."""

    hash_id: int
    """The name, 0 to 2^64 - 1."""
    length: int
    """Number of tokens, at least one."""


@value(frozen=True, slots=True)
class WorkloadRequest:
    """One request of a workload."""

    index: int
    """Position in the workload, from 0."""
    arrival_s: float
    """Seconds after the workload's start. A later turn of a session arrives when the one before it has ended and
    `think_s` have passed, but not before this.
    """
    input_length: int
    """Tokens of the prompt."""
    output_length: int
    """Tokens to generate."""
    pieces: Sequence[Piece]
    """The prompt, in order; their lengths add up to `input_length`."""
    session: int | None = None
    """Requests of one session are sent one after the other, in the order of their turns."""
    turn: int = 0
    think_s: float = 0.0

    def block_ids(self) -> Sequence[Piece]:
        """The prompt as pieces, for callers that need no tokens."""
        return self.pieces

    def token_ids(self, vocab_size: int) -> list[int]:
        """The prompt, each id in [0, vocab_size)."""
        parts = [piece_tokens(piece, vocab_size) for piece in self.pieces]
        whole: list[int] = (parts[0] if len(parts) == 1 else np.concatenate(parts)).tolist()
        return whole


def unique_piece(length: int, *names: int) -> Piece:
    """A piece whose name is a hash of numbers (the seed, the request's index ...): other numbers, other tokens."""
    state = 0
    for name in names:
        state = _mixed((state ^ name) & _MASK)
    return Piece(state | _UNIQUE, length)


def piece_tokens(piece: Piece, vocab_size: int) -> NDArray[np.int64]:
    """The piece's token ids: SplitMix64 over their positions, seeded by the name (Steele et al., OOPSLA 2014)."""
    seed = np.uint64(_mixed(piece.hash_id & _MASK))
    z = seed + np.arange(1, piece.length + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return (z % np.uint64(vocab_size)).astype(np.int64)


def _mixed(value: int) -> int:
    z = (value + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
