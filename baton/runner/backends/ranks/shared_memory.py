"""Memory that the ranks of one host share: files without a name, so that nothing is left behind however a rank ends."""

from __future__ import annotations

import mmap
import os
import tempfile

import torch

_KEPT_BYTES = 256 << 20
"""How many bytes of a shared file stay in memory when an exchange is over."""


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
