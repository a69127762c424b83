"""Limits log lines about conditions that last: the first is written at once, then one in each interval with a count."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

INTERVAL_S = 60.0


class LimitedLog:
    """The log lines about one condition: at most one in each interval, whoever causes the condition and however often.

    Make one for each condition and keep it. Lines that are not written are counted, and the next line has the count.
    Not for use by several threads.
    """

    def __init__(
        self,
        log: logging.Logger,
        level: int = logging.WARNING,
        interval_s: float = INTERVAL_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`now` returns seconds on a clock that does not go back."""
        self._log = log
        self._level = level
        self._interval_s = interval_s
        self._now = now
        self._last_at: float | None = None
        """When the last line was written; None while the condition does not hold."""
        self.num_unwritten = 0
        """How often it happened since the last line."""

    def happened(self, message: str, *args: object) -> bool:
        """The condition holds: write a line if the last one is an interval old. `message` and `args` are those of
        `logging`. Returns whether a line was written.
        """
        now = self._now()
        if self._last_at is not None and now - self._last_at < self._interval_s:
            self.num_unwritten += 1
            return False
        if self._last_at is not None and self.num_unwritten:
            message += " (and %d more times in the last %.0f s)"
            args = (*args, self.num_unwritten, now - self._last_at)
        self._last_at, self.num_unwritten = now, 0
        self._log.log(self._level, message, *args)
        return True

    def is_over(self, message: str, *args: object) -> None:
        """The condition has ended: write a line with the rest of the count, so that the next time counts as the first.
        Does nothing if the condition did not hold.
        """
        if self._last_at is None:
            return
        if self.num_unwritten:
            message += " (it happened %d more times in the last %.0f s)"
            args = (*args, self.num_unwritten, self._now() - self._last_at)
        self._last_at, self.num_unwritten = None, 0
        self._log.log(self._level, message, *args)
