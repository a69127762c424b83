"""The fake of `EngineDriver`: an engine's driver without its thread."""

from __future__ import annotations

from baton.node.driver import EngineDriver


class FakeEngineDriver(EngineDriver):
    """Runs the driver's turns in the caller's thread, when a test calls `turn` or `run`."""

    def start(self) -> None:
        return

    def stop(self) -> None:
        return

    def turn(self) -> None:
        """Do what the thread would do next, which is nothing while it would sleep."""
        if self._core.has_work() or not self._inbox.empty() or self.has_due:
            self._turn()

    def turns(self, count: int) -> None:
        for _ in range(count):
            self.turn()

    def run(self, limit: int = 100) -> None:
        """Run turns until the thread would sleep. Raises AssertionError if that takes more than `limit` turns."""
        for _ in range(limit):
            if not (self._core.has_work() or not self._inbox.empty() or self.has_due):
                return
            self._turn()
        raise AssertionError(f"still busy after {limit} turns")
