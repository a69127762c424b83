"""The interface of the ranks behind the first one, in whatever way they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol


class FollowingRanks(Protocol):
    """The ranks behind the first one, as `RankGroup` runs them in processes."""

    @property
    def pids(self) -> Sequence[int]:
        """Their process ids, in order; empty if they are no processes."""
        ...

    @property
    def why_lost(self) -> str:
        """Why the ranks are lost; empty while they are not."""
        ...

    def on_lost(self, callback: Callable[[str], None]) -> None:
        """Call `callback` with the reason once the ranks are lost, from any thread, or now if they are lost.

        It replaces the callback that was given before.
        """
        ...

    def lose(self, reason: str) -> None:
        """Lose the ranks: no step can be computed any more. Only the first reason counts."""
        ...

    def close(self) -> None:
        """End the ranks, and wait for them; idempotent."""
        ...
