"""The buffers of a program: its arguments, which each step passes in, and scratch memory that grows with the steps."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from baton.runner.backends.cpu.kernels.barrier import GrowingMemory
from baton.runner.backends.cpu.kernels.errors import KernelArgumentError

_CACHE_LINE = 64
_GROWTH = 64
"""The number of rows for which scratch memory is allocated is a multiple of this."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Some columns of a buffer that has one row for each token of a step, or for each token that samples."""

    buffer: int
    """The buffer's number."""
    first: int
    """The first column."""
    width: int
    """Number of columns."""
    stride: int
    """Number of elements from row to row."""
    sampled: bool
    """Whether the buffer has only the rows that sample."""
    dtype: torch.dtype

    def columns(self, first: int, end: int) -> Rows:
        """The columns `first` to `end` of these."""
        return replace(self, first=self.first + first, width=end - first)


@dataclass(slots=True)
class _SharedBuffer:
    """A buffer in shared memory."""

    number: int
    row_bytes: int = 0
    first: int = 0
    """Where it begins in the latest step, in bytes."""


class Buffers:
    """Numbered buffers of a row for each token, or for each token that samples.

    All buffers are declared while operations are recorded, before `addresses` is called for the first step.
    """

    def __init__(self, dtype: torch.dtype, shared_memory: GrowingMemory | None = None) -> None:
        """`shared_memory`: for rows that this process shares with others, who declare the same ones."""
        self._dtype = dtype
        self._shared_memory = shared_memory
        self._shared: dict[str, _SharedBuffer] = {}
        self._arguments: list[Rows] = []
        self._scratch: dict[str, int] = {}
        self._row_bytes: dict[int, int] = {}
        """The bytes of a row of each scratch buffer."""
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._capacity = 0
        self._selections: dict[bool, int] = {}
        """The buffers of selections, by whether they have only the rows that sample."""
        self._selected = torch.empty(0, dtype=torch.int64)

    def argument(self, width: int, sampled: bool, dtype: torch.dtype) -> Rows:
        """Declare a buffer that each step passes in, after those that were declared before."""
        rows = Rows(self._count(), 0, width, width, sampled, dtype)
        self._arguments.append(rows)
        return rows

    def scratch(self, name: str, width: int, sampled: bool, dtype: torch.dtype | None = None) -> Rows:
        """Rows of the scratch buffer with this name, which is as wide as its widest use; dtype: None for the usual."""
        if name not in self._scratch:
            self._scratch[name] = self._count()
        buffer, dtype = self._scratch[name], self._dtype if dtype is None else dtype
        self._row_bytes[buffer] = max(width * dtype.itemsize, self._row_bytes.get(buffer, 0))
        return Rows(buffer, 0, width, width, sampled, dtype)

    def selection(self, sampled: bool) -> Rows:
        """Rows of keys that were selected (key_selection.py), as many words each as `addresses` is told."""
        if sampled not in self._selections:
            self._selections[sampled] = self._count()
        return Rows(self._selections[sampled], 0, 0, 0, sampled, torch.int64)

    @property
    def has_selections(self) -> bool:
        return bool(self._selections)

    def shared(self, name: str, width: int, sampled: bool, dtype: torch.dtype) -> Rows:
        """Rows of the shared buffer with this name, which is as wide as its widest use."""
        if name not in self._shared:
            self._shared[name] = _SharedBuffer(self._count())
        buffer = self._shared[name]
        buffer.row_bytes = max(width * dtype.itemsize, buffer.row_bytes)
        return Rows(buffer.number, 0, width, width, sampled, dtype)

    def shared_rows(self, rows: Rows, num_rows: int) -> torch.Tensor:
        """The first rows of a shared buffer in the latest step: [num_rows, width]."""
        buffer = next(buffer for buffer in self._shared.values() if buffer.number == rows.buffer)
        size = num_rows * rows.stride * rows.dtype.itemsize
        memory = self._shared_bytes(buffer.first + size)[buffer.first : buffer.first + size]
        return memory.view(rows.dtype).view(num_rows, rows.stride)

    def require_arguments(self, arguments: Sequence[torch.Tensor], num_rows: int, num_sampled: int) -> None:
        """Raises KernelArgumentError for tensors that differ from what was declared."""
        for argument, tensor in zip(self._arguments, arguments, strict=True):
            shape = (num_sampled if argument.sampled else num_rows, argument.width)
            fits = tensor.shape == shape and tensor.dtype == argument.dtype
            if not fits or not tensor.is_contiguous() or not tensor.is_cpu:
                raise KernelArgumentError("arguments", f"{tuple(tensor.shape)} must be {shape} {argument.dtype}")

    def addresses(
        self, arguments: Sequence[torch.Tensor], rows: int, selection_words: int = 0
    ) -> ctypes.Array[ctypes.c_void_p]:
        """The address of each buffer, for a step of at most `rows` rows; valid until the next call."""
        total = sum(self._row_bytes.values())
        if rows > self._capacity:
            # The old memory is freed first, since both together may be too much.
            self._capacity, self._memory = 0, torch.empty(0, dtype=torch.uint8)
            capacity = -(-rows // _GROWTH) * _GROWTH
            self._memory = torch.empty(capacity * total, dtype=torch.uint8)
            self._capacity = capacity
        addresses = (ctypes.c_void_p * self._count())()
        for argument, tensor in zip(self._arguments, arguments, strict=True):
            addresses[argument.buffer] = tensor.data_ptr()
        address = self._memory.data_ptr()
        for buffer, row_bytes in self._row_bytes.items():
            addresses[buffer] = address
            address += self._capacity * row_bytes
        of_selection = rows * selection_words
        if len(self._selections) * of_selection > self._selected.numel():
            self._selected = torch.empty(len(self._selections) * of_selection, dtype=torch.int64)
        for place, buffer in enumerate(self._selections.values()):
            addresses[buffer] = self._selected.data_ptr() + place * of_selection * self._selected.itemsize
        self._place_shared(addresses, rows)
        return addresses

    def _place_shared(self, addresses: ctypes.Array[ctypes.c_void_p], rows: int) -> None:
        """Lay out the shared buffers one after the other: for equal steps alike in all processes."""
        end = 0
        for buffer in self._shared.values():
            buffer.first = end
            end += -(-rows * buffer.row_bytes // _CACHE_LINE) * _CACHE_LINE
        if self._shared:
            base = self._shared_bytes(end).data_ptr()
            for buffer in self._shared.values():
                addresses[buffer.number] = base + buffer.first

    def _shared_bytes(self, size: int) -> torch.Tensor:
        if self._shared_memory is None:
            raise KernelArgumentError("into", "is shared, but this program shares no memory")
        return self._shared_memory.at_least(size)

    def _count(self) -> int:
        return len(self._arguments) + len(self._scratch) + len(self._shared) + len(self._selections)
