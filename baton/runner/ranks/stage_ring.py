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
        poll, own = select.poll(), self._receiving.fileno()
        poll.register(own, select.POLLIN)
        if other is not None:
            poll.register(other, select.POLLIN)
        return any(descriptor == own for descriptor, _ in poll.poll(None if timeout is None else timeout * 1e3))

    def close(self) -> None:
        """Close this stage's copies of the two ends."""
        self._receiving.close()
        self._sending.close()
