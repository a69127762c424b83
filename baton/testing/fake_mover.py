"""The fake of `Mover`: a mover without its thread."""

from __future__ import annotations

from kv_transfer.mover.mover import Mover


class FakeMover(Mover):
    """Takes turns when it is told to, in the caller's thread, which is also the one that it answers from."""

    def start(self) -> None:
        self._make_agent()

    def stop(self) -> None:
        """Cancel what is queued and end; reads still in flight get no answer and stay counted."""
        if self._accepting:
            self._accepting = False
            self._shut_down()

    def turn(self) -> None:
        """What the thread would do next; nothing where it would sleep."""
        if self.has_work:
            self._turn()

    @property
    def has_work(self) -> bool:
        """Whether the thread would not sleep until it is told something."""
        return self._moved or bool(self._in_flight) or self._open_leases > 0 or not self._inbox.empty()

    def _pause(self) -> float | None:
        return 0.0
