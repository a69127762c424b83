"""The fake of `EngineDriver`: an engine's driver without its thread."""

from __future__ import annotations

from baton.node.driver import EngineDriver


class FakeEngineDriver(EngineDriver):
    """Takes turns when it is told to, in the caller's thread."""

    def start(self) -> None:
        return

    def stop(self) -> None:
        return

    def turn(self) -> None:
        """What the thread would do next; nothing where it would sleep."""
        if self._core.has_work() or not self._inbox.empty():
            self._turn()

    def run(self, limit: int = 100) -> None:
        """Turn until it would sleep; raises AssertionError when it never does."""
        for _ in range(limit):
            if not self._core.has_work() and self._inbox.empty():
                return
            self._turn()
        raise AssertionError(f"still busy after {limit} turns")
