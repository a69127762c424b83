"""Ranks on one host, which exchange results through shared memory."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from baton.errors import ConfigError
from baton.runner.backends.cpu.kernels.barrier import Barrier, BarrierTag
from baton.runner.backends.ranks.shard import Shard
from baton.runner.backends.ranks.shared_memory import MemoryInTurns, SharedMemory


@dataclass(frozen=True, slots=True)
class SharedFiles:
    """The descriptors of what the ranks of one stage share; whoever makes them closes them."""

    control: int
    """The barrier."""
    program: int
    """The rows that the operations of a program exchange."""
    boxes: tuple[int, int]
    """The two buffers through which single operations exchange results, in turns."""
    cache: int
    """The KV cache of all stages, to which each rank writes its own layers and heads."""

    @classmethod
    def of(cls, descriptors: Sequence[int]) -> SharedFiles:
        """The files with these descriptors, in the order of `descriptors`."""
        control, program, first_box, second_box, cache = descriptors
        return cls(control, program, (first_box, second_box), cache)

    @property
    def descriptors(self) -> tuple[int, ...]:
        return (self.control, self.program, *self.boxes, self.cache)


class HostRanks:
    """One rank's view of the ranks of its stage, on one host (`Ranks`). Used by one thread at a time."""

    def __init__(self, shard: Shard, files: SharedFiles, *, makes_cache: bool) -> None:
        """`makes_cache`: for one rank of a model, which writes the cache once before any rank computes."""
        self.shard = shard
        self._makes_cache = makes_cache
        self.barrier = Barrier(SharedMemory(files.control), shard.size)
        self.program_memory = SharedMemory(files.program)
        """Memory of the buffers of programs, of which one runs at a time."""
        self._cache = SharedMemory(files.cache)
        self._boxes = MemoryInTurns(files.boxes)

    def gather(self, own: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        rows, rank = own.shape[0], self.shard.rank
        ends = list(accumulate(widths))
        box = self._next_box(rows, ends[-1], own.dtype)
        box[:, ends[rank] - widths[rank] : ends[rank]] = own
        self.barrier.wait(BarrierTag.GATHER)
        return box.clone()

    def merge_rows(self, own: torch.Tensor, places: torch.Tensor, num_rows: int) -> torch.Tensor:
        box = self._next_box(num_rows, own.shape[1], own.dtype)
        box[places] = own
        self.barrier.wait(BarrierTag.MERGE)
        return box.clone()

    def cache_memory(self, num_bytes: int) -> torch.Tensor:
        if not self._makes_cache:
            return self._cache.exactly(num_bytes)
        try:
            # The system promises shared memory that it does not have; of private memory it says so.
            mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"this machine has no memory for a KV cache of {num_bytes} bytes; make kv_cache_memory smaller"
            ) from error
        # Written once, as the cache of one process is, and before any rank computes.
        return self._cache.exactly(num_bytes).zero_()

    def trim(self) -> None:
        """Give back what an unusually large exchange took; called by one rank while no other reads or writes."""
        for memory in (self.program_memory, *self._boxes.both):
            memory.trim()

    def _next_box(self, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """The box in turn: [rows, columns]."""
        size = rows * columns * dtype.itemsize
        return self._boxes.next().at_least(size)[:size].view(dtype).view(rows, columns)
