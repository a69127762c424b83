"""Keeps back what the engine's thread posts to the event loop, until the tokens of the same step are on their way.

A client waits for the first token. Offers, which start reads on the other node, are posted after it. Work that nobody
waits for yet is done last.
"""

from __future__ import annotations

from collections.abc import Callable


class Outbox:
    """The actions and the work that were kept back. Belongs to the engine's thread."""

    def __init__(self, post: Callable[[Callable[[], None]], object]) -> None:
        """`post` runs a callable on the event loop, in order."""
        self._post = post
        self._kept: list[Callable[[], None]] = []
        self._work: list[Callable[[], None]] = []

    def add(self, action: Callable[[], None]) -> None:
        """Keep an action, which `flush` posts to the event loop."""
        self._kept.append(action)

    def add_work(self, work: Callable[[], None]) -> None:
        """Keep work, which `flush` does on this thread once all actions are posted."""
        self._work.append(work)

    def flush(self) -> None:
        """Post the actions in order, then do the work."""
        kept, self._kept = self._kept, []
        for action in kept:
            self._post(action)
        kept_work, self._work = self._work, []
        for work in kept_work:
            work()
