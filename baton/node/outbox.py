"""What the engine's thread leaves for the loop, kept back until the tokens of the same step are on their way.

The first token is what a client waits for; offers, which wake the other node and its reads, can wait for it; and work
that nobody waits for yet comes last of all.
"""

from __future__ import annotations

from collections.abc import Callable


class Outbox:
    """Belongs to the engine's thread."""

    def __init__(self, post: Callable[[Callable[[], None]], None]) -> None:
        """`post` runs a callable on the loop, in order."""
        self._post = post
        self._kept: list[Callable[[], None]] = []
        self._work: list[Callable[[], None]] = []

    def add(self, action: Callable[[], None]) -> None:
        """Keep an action until `flush`."""
        self._kept.append(action)

    def add_work(self, work: Callable[[], None]) -> None:
        """Keep something to do here, as part of `flush`, when all that was kept has been posted."""
        self._work.append(work)

    def flush(self) -> None:
        """Post what was kept, in order; then do the work."""
        kept, self._kept = self._kept, []
        for action in kept:
            self._post(action)
        todo, self._work = self._work, []
        for work in todo:
            work()
