"""Lets a simulated runner take steps only as a test allows them."""

from __future__ import annotations

import threading

LONG_S = 60.0


class StepGate:
    """Holds the engine's thread in its step while it is closed; to be passed as `SimulatedSpec(sleep=...)`."""

    def __init__(self, allowed: int | None = None) -> None:
        """`allowed`: the number of steps that may pass; None: all."""
        self._condition = threading.Condition()
        self._allowed = allowed
        self._passed = 0

    def __call__(self, seconds: float) -> None:
        with self._condition:
            self._passed += 1
            self._condition.notify_all()
            if not self._condition.wait_for(lambda: self._allowed is None or self._passed <= self._allowed, LONG_S):
                raise TimeoutError("the test forgot its gate")

    def allow(self, steps: int | None) -> None:
        """Set the number of steps that may pass in all; None: all."""
        with self._condition:
            self._allowed = steps
            self._condition.notify_all()

    def wait_for_step(self, number: int) -> None:
        """Block until the engine has reached step `number` (counted from 1)."""
        with self._condition:
            if not self._condition.wait_for(lambda: self._passed >= number, LONG_S):
                raise TimeoutError(f"step {number} never came")
