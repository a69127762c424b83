"""Ranks on one host, which exchange results through shared memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from baton.runner.backends.cpu.kernels.meeting import Meeting
from baton.runner.backends.ranks.shard import Shard
from baton.runner.backends.ranks.shared_memory import MemoryInTurns, SharedMemory, make_shared_file


@dataclass(frozen=True, slots=True)
class SharedFiles:
    """The descriptors of what ranks share; whoever makes it closes it."""

    control: int
    """Where the ranks meet."""
    cache: int
    """The KV cache, to which each rank writes its own heads."""
    program: int
    """The rows that the operations of a program exchange."""
    step: int
    """What the first rank announces."""
    boxes: tuple[int, int]
    """What they exchange with single operations, in turns."""

    @classmethod
    def make(cls) -> SharedFiles:
        return cls.of([make_shared_file() for _ in range(6)])

    @classmethod
    def of(cls, descriptors: Sequence[int]) -> SharedFiles:
        """The files with these descriptors, in the order of `descriptors`."""
        control, cache, program, step, first_box, second_box = descriptors
        return cls(control, cache, program, step, (first_box, second_box))

    @property
    def descriptors(self) -> tuple[int, ...]:
        return (self.control, self.cache, self.program, self.step, *self.boxes)

    def close(self) -> None:
        """Close the descriptors; mappings stay."""
        for descriptor in self.descriptors:
            os.close(descriptor)


class HostRanks:
    """One rank's view of the ranks of its host (`Ranks`). Used by one thread at a time."""

    def __init__(self, shard: Shard, files: SharedFiles) -> None:
        self.shard = shard
        self.meeting = Meeting(SharedMemory(files.control), shard.size)
        self.program_memory = SharedMemory(files.program)
        """For the buffers of programs, one of which runs at a time."""
        self._cache = SharedMemory(files.cache)
        self._boxes = MemoryInTurns(files.boxes)

    def gather(self, own: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        rows, rank = own.shape[0], self.shard.rank
        ends = list(accumulate(widths))
        box = self._next_box(rows, ends[-1], own.dtype)
        box[:, ends[rank] - widths[rank] : ends[rank]] = own
        self.meeting.meet()
        return box.clone()

    def merge_rows(self, own: torch.Tensor, places: torch.Tensor, num_rows: int) -> torch.Tensor:
        box = self._next_box(num_rows, own.shape[1], own.dtype)
        box[places] = own
        self.meeting.meet()
        return box.clone()

    def cache_memory(self, num_bytes: int) -> torch.Tensor:
        memory = self._cache.exactly(num_bytes)
        return memory.zero_() if self.shard.rank == 0 else memory

    def _next_box(self, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """The box in turn: [rows, columns]."""
        size = rows * columns * dtype.itemsize
        return self._boxes.next().at_least(size)[:size].view(dtype).view(rows, columns)
