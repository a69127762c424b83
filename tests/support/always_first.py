"""A source of randomness for tests that depend on the router at which a client begins."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TypeVar

T = TypeVar("T")


class AlwaysFirst(Random):
    """Always chooses the first item of a sequence, so every client begins at the first router."""

    def choice(self, seq: Sequence[T]) -> T:  # type: ignore[override]
        return seq[0]
