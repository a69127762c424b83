"""What the engine's thread leaves for the loop, kept back until the tokens of the same step are on their way.

The first token is what a client waits for; offers, which wake the other node and its reads, can wait for it. What
nobody waits for, and what the engine's thread does itself, comes last.
"""

from __future__ import annotations

from collections.abc import Callable


class Outbox:
    """Belongs to the engine's thread."""

    def __init__(self, post: Callable[[Callable[[], None]], None]) -> None:
        """`post` runs a callable on the loop, in order."""
        self._post = post
        self._kept: list[Callable[[], None]] = []
        self._chores: list[Callable[[], None]] = []

    def add(self, action: Callable[[], None]) -> None:
        """Keep an action until `flush`."""
        self._kept.append(action)

    def add_chore(self, chore: Callable[[], None]) -> None:
        """Keep something, which must not raise, that `flush` does in the calling thread after everything else."""
        self._chores.append(chore)

    def flush(self) -> None:
        """Post what was kept, in order, then do the chores."""
        kept, self._kept = self._kept, []
        for action in kept:
            self._post(action)
        chores, self._chores = self._chores, []
        for chore in chores:
            chore()
