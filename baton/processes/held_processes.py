"""Processes that are ended by whoever holds them, though it has not started them."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterable


class HeldProcesses:
    """Processes that this one may kill though it has not started them, held by descriptor (pidfd_open(2)).

    Their numbers may be those of others once they have ended. May be used by several threads.
    """

    def __init__(self) -> None:
        self._descriptors: list[int] = []
        self._lock = threading.Lock()

    def hold(self, pids: Iterable[int]) -> None:
        """Hold these processes, but for those that have ended, and all if the kernel has no such descriptors."""
        with self._lock:
            for pid in pids:
                with contextlib.suppress(OSError):
                    self._descriptors.append(os.pidfd_open(pid))

    def kill(self) -> None:
        """Kill those that run, also if they are stopped; idempotent."""
        with self._lock:
            for descriptor in self._descriptors:
                with contextlib.suppress(OSError):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)

    def let_go(self) -> None:
        """Close the descriptors; idempotent."""
        with self._lock:
            while self._descriptors:
                os.close(self._descriptors.pop())
