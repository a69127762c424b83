"""A source of randomness for tests in which it matters at which router a client begins."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TypeVar

T = TypeVar("T")


class FirstOfAll(Random):
    """Chooses the first of a sequence: every client begins at the first router."""

    def choice(self, seq: Sequence[T]) -> T:  # type: ignore[override]
        return seq[0]
