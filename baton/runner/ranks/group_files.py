"""What the ranks of a model share: files in memory, and the ring of sockets that connects the stages."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

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
