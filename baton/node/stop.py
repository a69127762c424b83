"""How one run of a node is told to end: for good, or to begin again as another role."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from baton.messages.node import Role


class NodeStop:
    """A call is a signal: the first one drains, the second one does not wait any longer. Belongs to one event loop.

    It outlives an incarnation: `begin_again` says whether another one follows.
    """

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        """The running incarnation is to end when its work is done."""
        self.ending = asyncio.Event()
        """It is the last one, and its work may take so long only."""
        self.forced = asyncio.Event()
        self.on_drained: Callable[[], None] = lambda: None
        """Called when an incarnation has nothing more to lose: what is left is to take it down."""
        self._signalled = False
        self._next_role: Role | None = None

    def __call__(self) -> None:
        if self._signalled:
            self.forced.set()
        self._signalled = True
        self.drain()

    @property
    def is_signalled(self) -> bool:
        """A signal has come: the next one forces."""
        return self._signalled

    def drain(self) -> None:
        """Let the running work end. Idempotent; a signal that follows is the first one."""
        self.ending.set()
        self.asked.set()

    def force(self) -> None:
        """Don't wait for anything."""
        self.drain()
        self.forced.set()

    def change_role(self, role: Role) -> None:
        """Let the running work end, however long it takes, and begin again as this. The latest word counts."""
        self._next_role = role
        self.asked.set()

    def begin_again(self) -> Role | None:
        """Once an incarnation has ended: what the next one is to be; None: there is none."""
        role, self._next_role = self._next_role, None
        if role is None or self.ending.is_set():
            return None
        self.asked.clear()
        return role
