"""A barrier of ranks in shared memory, which is aborted once a rank is lost (csrc/barrier.c)."""

from __future__ import annotations

import ctypes
import enum
import os
from typing import Protocol

import torch

from baton.runner.backends.cpu.kernels.library import WAITING, check_status, library


class GrowingMemory(Protocol):
    """Shared memory of at least so many bytes."""

    def at_least(self, num_bytes: int) -> torch.Tensor: ...


class BarrierTag(enum.IntEnum):
    """What ranks wait for. The tag of a barrier of a program is OPERATION plus its number among these."""

    GATHER = 1
    MERGE = 2
    STEP = 3
    DONE = 4
    REPORTS = 5
    OPERATION = 16


def sleep_at_once() -> None:
    """Let this process sleep at its barriers, from now on, instead of spinning for a while first.

    For ranks that have fewer processors than they are, or share the interpreter's lock: their bits are the same.
    """
    library().functions.baton_barrier_sleep_at_once()


def share_processors(num_ranks: int) -> None:
    """Let this process sleep at once if so many ranks on this host are more than there are processors for them."""
    if num_ranks > len(os.sched_getaffinity(0)):
        sleep_at_once()


class Barrier:
    """A barrier in memory that is zero before the first rank arrives; used by one thread of each rank."""

    def __init__(self, memory: GrowingMemory, num_ranks: int) -> None:
        functions = library().functions
        share_processors(num_ranks)
        self.num_ranks = num_ranks
        self._memory = memory.at_least(functions.baton_barrier_bytes())
        self.address = self._memory.data_ptr()
        self._arrive = functions.baton_barrier_arrive
        self._wait = functions.baton_barrier_wait
        self._abort = functions.baton_barrier_abort

    def wait(self, tag: BarrierTag) -> None:
        """Wait until all ranks have arrived; what each wrote before is visible to all.

        Raises RankLost, also where another rank has arrived with another tag.
        """
        generation = ctypes.c_uint32()
        status = self._arrive(self.address, self.num_ranks, tag, ctypes.byref(generation))
        while status == WAITING:
            # In Python, so that Ctrl-C ends a long wait.
            status = self._wait(self.address, generation)
        check_status(status)

    def abort(self) -> None:
        """Make all waiting here, now and later, raise RankLost on every rank."""
        self._abort(self.address)
