"""Where ranks meet: a barrier in shared memory that ends once a rank is lost (csrc/meeting.c)."""

from __future__ import annotations

import ctypes
import enum
from typing import Protocol

import torch

from baton.runner.backends.cpu.kernels.library import WAITING, check_status, library


class GrowingMemory(Protocol):
    """Shared memory of at least so many bytes."""

    def at_least(self, num_bytes: int) -> torch.Tensor: ...


class MeetFor(enum.IntEnum):
    """What ranks meet for. Operations of a program meet for OPERATION and the operation's number."""

    GATHER = 1
    MERGE = 2
    STEP = 3
    DONE = 4
    OPERATION = 16


class Meeting:
    """A meeting place of ranks, in memory that is zero before the first of them comes."""

    def __init__(self, memory: GrowingMemory, num_ranks: int) -> None:
        functions = library().functions
        self.num_ranks = num_ranks
        self._memory = memory.at_least(functions.baton_meeting_bytes())
        self.address = self._memory.data_ptr()
        self._arrive = functions.baton_arrive
        self._wait = functions.baton_wait
        self._lose = functions.baton_lose_rank

    def meet(self, reason: MeetFor) -> None:
        """Wait until all ranks have come; what each wrote before is visible to all.

        Raises RankLost, also where the others have come for another reason.
        """
        generation = ctypes.c_uint32()
        status = self._arrive(self.address, self.num_ranks, reason, ctypes.byref(generation))
        while status == WAITING:
            # In Python, so that Ctrl-C ends a long wait.
            status = self._wait(self.address, generation)
        check_status(status)

    def lose(self) -> None:
        """Make this and all later meetings raise RankLost on every rank."""
        self._lose(self.address)
