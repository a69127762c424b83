"""What the engine's thread leaves for the loop, kept back until the tokens of the same step are on their way.

The first token is what a client waits for; offers, which wake the other node and its reads, can wait for it.
"""

from __future__ import annotations

from collections.abc import Callable


class Outbox:
    """Belongs to the engine's thread."""

    def __init__(self, post: Callable[[Callable[[], None]], None]) -> None:
        """`post` runs a callable on the loop, in order."""
        self._post = post
        self._kept: list[Callable[[], None]] = []

    def add(self, action: Callable[[], None]) -> None:
        """Keep an action until `flush`."""
        self._kept.append(action)

    def flush(self) -> None:
        """Post what was kept, in order."""
        kept, self._kept = self._kept, []
        for action in kept:
            self._post(action)
