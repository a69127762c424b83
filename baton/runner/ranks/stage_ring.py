"""The ring of stages: each tells the next one which micro-batch it has computed, and the last one tells the first.

The rows themselves are in the micro-batch's slot (`micro_batch_slot.py`). A stage that waits here takes no time.
"""

from __future__ import annotations

import os
import select
import socket

from baton.runner.backends.cpu.kernels.errors import RankLost


class StageRing:
    """One stage's place in the ring; used by one thread. Micro-batches go round in the order in which they began."""

    def __init__(self, receiving: int, sending: int) -> None:
        """`receiving`, `sending`: descriptors of the two ends, of which it keeps copies."""
        self._receiving = socket.socket(fileno=os.dup(receiving))
        self._sending = socket.socket(fileno=os.dup(sending))
        self._receiving.setblocking(True)

    def send(self) -> None:
        """Tell the next stage that a micro-batch is ready for it. Raises RankLost."""
        try:
            self._sending.sendall(b"\0")
        except OSError as error:
            raise RankLost("the ring of stages is cut") from error

    def receive(self) -> None:
        """Wait until the next micro-batch is ready. Raises RankLost once the ring is cut."""
        try:
            received = self._receiving.recv(1)
        except OSError as error:
            raise RankLost("the ring of stages is cut") from error
        if not received:
            raise RankLost("the ring of stages is cut")

    def wait(self, other: socket.socket | None = None, timeout: float | None = None) -> bool:
        """Wait until `receive` would return at once, or `other` can be read; returns whether `receive` would."""
        return wait_until_readable(self._receiving, other, timeout)

    def close(self) -> None:
        """Close this stage's copies of the two ends."""
        self._receiving.close()
        self._sending.close()


def wait_until_readable(own: socket.socket, other: socket.socket | None, timeout: float | None) -> bool:
    """Wait until one of two sockets can be read, or for `timeout` seconds; returns whether `own` can be read."""
    poll, descriptor = select.poll(), own.fileno()
    poll.register(descriptor, select.POLLIN)
    if other is not None:
        poll.register(other, select.POLLIN)
    return any(found == descriptor for found, _ in poll.poll(None if timeout is None else timeout * 1e3))
