"""What the ranks of a model share: files in memory, and the ring of sockets that connects the stages.

In the ring each stage tells the next one which micro-batch it has computed, and the last one tells the first. The rows
themselves are in the micro-batch's slot (`micro_batch_slot.py`). A stage that waits at the ring takes no time.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from baton.runner.backends.cpu.kernels.errors import RankLost
from baton.runner.backends.ranks.host_ranks import SharedFiles, make_shared_file

SLOTS_OF_A_STAGE = 2
"""Slots for each stage: one micro-batch that it computes, and one that waits for it."""


@dataclass(frozen=True, slots=True)
class RankFiles:
    """The descriptors that one rank needs."""

    stage: SharedFiles
    """What the rank shares with those of its stage."""
    control: int
    """The barrier of all ranks."""
    reports: int
    """The reports that stages exchange while they load."""
    receiving: int
    """The end of the ring from which the stage is told of its next micro-batch."""
    sending: int
    """The end of the ring to the next stage."""
    slots: tuple[int, ...]
    """The memory of the micro-batches that are being computed, in turns."""

    @classmethod
    def of(cls, descriptors: Sequence[int]) -> RankFiles:
        """The files with these descriptors, in the order of `descriptors`."""
        *of_stage, control, reports, receiving, sending = descriptors[:9]
        return cls(SharedFiles.of(of_stage), control, reports, receiving, sending, tuple(descriptors[9:]))

    @property
    def descriptors(self) -> tuple[int, ...]:
        return (*self.stage.descriptors, self.control, self.reports, self.receiving, self.sending, *self.slots)


class GroupFiles:
    """The descriptors of everything that the ranks of one model share, until `close`."""

    def __init__(self, num_stages: int) -> None:
        """Make empty files and the ring; raises OSError."""
        with contextlib.ExitStack() as on_failure:

            def make() -> int:
                descriptor = make_shared_file()
                on_failure.callback(os.close, descriptor)
                return descriptor

            cache, control, reports = make(), make(), make()
            slots = tuple(make() for _ in range(SLOTS_OF_A_STAGE * num_stages if num_stages > 1 else 1))
            links = []
            for _ in range(num_stages):
                links.append(socket.socketpair())
                on_failure.callback(links[-1][0].close)
                on_failure.callback(links[-1][1].close)
            self.stages = [
                RankFiles(
                    SharedFiles(make(), make(), (make(), make()), cache),
                    control,
                    reports,
                    # The last stage's link leads to the first stage.
                    receiving=links[index - 1][1].fileno(),
                    sending=links[index][0].fileno(),
                    slots=slots,
                )
                for index in range(num_stages)
            ]
            self._ring = [end for link in links for end in link]
            self._made = on_failure.pop_all()

    def cut_ring(self) -> None:
        """Make all waiting at the ring, now and later, end with RankLost in every process; idempotent."""
        for end in self._ring:
            with contextlib.suppress(OSError):  # the socket is closed or cut already
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the descriptors; mappings stay. Idempotent."""
        self._made.close()


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
