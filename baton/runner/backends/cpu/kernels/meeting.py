"""Where ranks meet: a barrier in shared memory that ends once a rank is lost (csrc/meeting.c)."""

from __future__ import annotations

from typing import Protocol

import torch

from baton.runner.backends.cpu.kernels.library import check_status, library


class GrowingMemory(Protocol):
    """Shared memory of at least so many bytes."""

    def at_least(self, num_bytes: int) -> torch.Tensor: ...


class Meeting:
    """A meeting place of ranks, in memory that is zero before the first of them comes."""

    def __init__(self, memory: GrowingMemory, num_ranks: int) -> None:
        functions = library().functions
        self.num_ranks = num_ranks
        self._memory = memory.at_least(functions.baton_meeting_bytes())
        self.address = self._memory.data_ptr()
        self._meet = functions.baton_meet
        self._lose = functions.baton_lose_rank

    def meet(self) -> None:
        """Wait until all ranks have come; what each wrote before is visible to all. Raises RankLost."""
        check_status(self._meet(self.address, self.num_ranks))

    def lose(self) -> None:
        """Make this and all later meetings raise RankLost on every rank."""
        self._lose(self.address)
