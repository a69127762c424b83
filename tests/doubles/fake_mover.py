"""The fake of `Mover`: a mover without its thread."""

from __future__ import annotations

from kv_transfer.mover.mover import Mover


class FakeMover(Mover):
    """Runs the mover's turns in the caller's thread, when a test calls `turn`, and delivers its events there."""

    def start(self) -> None:
        self._make_agent()

    def stop(self) -> None:
        """Cancel what is queued, and end. Reads in flight get no event, and stay counted."""
        if self._accepting:
            self._accepting = False
            self._shut_down()

    def turn(self) -> None:
        """Do what the thread would do next, which is nothing while it would sleep."""
        if self.has_work:
            # So it waits for no command.
            self._reads.moved = True
            self._turn()

    @property
    def has_work(self) -> bool:
        """Whether the thread has work, so that it would not sleep until it gets the next command."""
        reads = self._reads
        return reads.moved or reads.is_in_flight or reads._num_readers > 0 or not self._inbox.empty()
