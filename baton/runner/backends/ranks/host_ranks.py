"""Ranks on one host, which exchange results through shared memory: files without a name, so that nothing is left behind
however a rank ends."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate

import torch

from baton.errors import ConfigError
from baton.runner.backends.cpu.kernels.barrier import Barrier, BarrierTag
from baton.runner.parts import Shard

_KEPT_BYTES = 256 << 20
"""How many bytes of a shared file stay in memory when an exchange is over."""
_NUM_FILES = 6


def make_shared_file() -> int:
    """A descriptor of an empty file in memory, which goes away with its last descriptor and mapping."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("baton-ranks", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class SharedMemory:
    """One process's mapping of a shared file, which grows as it is needed.

    A reader must not ask for more bytes than the writer had asked for before the barrier between them.
    """

    def __init__(self, descriptor: int) -> None:
        """`descriptor`: of a file from `make_shared_file`; the caller keeps it open."""
        self._descriptor = descriptor
        self._mapping: mmap.mmap | None = None
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def at_least(self, num_bytes: int) -> torch.Tensor:
        """The shared memory, uint8 with at least `num_bytes` elements; new bytes are zero.

        Tensors of earlier calls stay valid, and share what they have with later ones.
        """
        self._used = max(self._used, num_bytes)
        if self._bytes.numel() < num_bytes:
            self._map(1 << (num_bytes - 1).bit_length())
        return self._bytes

    def exactly(self, num_bytes: int) -> torch.Tensor:
        """The shared memory, uint8 [num_bytes], for a size that does not change."""
        if self._bytes.numel() < num_bytes:
            self._map(num_bytes)
        return self._bytes[:num_bytes]

    def trim(self) -> None:
        """Free the memory behind the first 256 MiB, if it was used; it reads as zeros then."""
        if self._used > _KEPT_BYTES and self._mapping is not None and hasattr(mmap, "MADV_REMOVE"):
            self._mapping.madvise(mmap.MADV_REMOVE, _KEPT_BYTES, len(self._mapping) - _KEPT_BYTES)
        self._used = 0

    def _map(self, num_bytes: int) -> None:
        size = -(-max(num_bytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        # Ranks exchange equally many rows, so they grow the file to the same size: none makes it smaller.
        if os.fstat(self._descriptor).st_size < size:
            os.ftruncate(self._descriptor, size)
        self._mapping = mmap.mmap(self._descriptor, size)
        self._bytes = torch.frombuffer(self._mapping, dtype=torch.uint8)


class MemoryInTurns:
    """Two pieces of shared memory, written in turns, so that an exchange needs only one barrier.

    Before a piece is written again, all ranks have passed the barrier of the exchange in the other one, and each had
    read this one before.
    """

    def __init__(self, descriptors: tuple[int, int]) -> None:
        self.both = [SharedMemory(descriptor) for descriptor in descriptors]

    def next(self) -> SharedMemory:
        """The piece for the next exchange; every rank calls it once for each."""
        self.both.reverse()
        return self.both[0]


@dataclass(frozen=True, slots=True)
class SharedFiles:
    """The descriptors of what the ranks of a stage share; whoever makes them closes them."""

    control: int
    """The barrier."""
    program: int
    """The rows that the operations of a program exchange."""
    boxes: tuple[int, int]
    """The two buffers through which single operations exchange results, in turns."""
    cache: int
    """The KV cache of the stage, to which each rank writes its own heads."""
    step: int
    """The step that the ranks compute."""

    @classmethod
    def make(cls) -> SharedFiles:
        """Make empty files; raises OSError."""
        with ExitStack() as on_failure:
            descriptors = []
            for _ in range(_NUM_FILES):
                descriptors.append(make_shared_file())
                on_failure.callback(os.close, descriptors[-1])
            on_failure.pop_all()
            return cls.of(descriptors)

    @classmethod
    def of(cls, descriptors: Sequence[int]) -> SharedFiles:
        """The files with these descriptors, in the order of `descriptors`."""
        control, program, first_box, second_box, cache, step = descriptors
        return cls(control, program, (first_box, second_box), cache, step)

    @property
    def descriptors(self) -> tuple[int, ...]:
        return (self.control, self.program, *self.boxes, self.cache, self.step)

    def close(self) -> None:
        """Close the descriptors; mappings stay. Call it once."""
        for descriptor in self.descriptors:
            os.close(descriptor)


class HostRanks:
    """One rank's view of the ranks of its stage, on one host (`Ranks`). Used by one thread at a time."""

    def __init__(self, shard: Shard, files: SharedFiles, *, makes_cache: bool) -> None:
        """`makes_cache`: for one rank of a stage, which writes the cache once before any rank computes."""
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
