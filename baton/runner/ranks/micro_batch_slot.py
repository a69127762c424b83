"""Where a micro-batch is while it is computed: its numbers, its rows between two stages, and its results.

A micro-batch is a step, or a part of one, that goes through the stages at once. The first rank writes the numbers, and
all ranks of all stages read them.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from baton.runner.backends.ranks.shared_memory import SharedMemory
from baton.runner.execution.input_batch import FlatBatch
from baton.runner.model.decoder import ModelOutput

Array = npt.NDArray[Any]

_WORD = 8
_HEADER_WORDS = 128
_MOST_DIMENSIONS = 3
"""The most dimensions of an array."""
_FIELDS = tuple(field.name for field in fields(FlatBatch))
_DTYPES = (np.dtype(np.int64), np.dtype(np.int32))
_ALIGNMENT = 64


class Task(enum.IntEnum):
    """What of a micro-batch is wanted."""

    LOGITS = 1
    LOGITS_AND_HIDDEN = 2


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What all stages compute together."""

    task: Task
    batch: FlatBatch
    logits_rows: Array | None
    """The rows that give logits; None: those that sample."""

    @property
    def num_results(self) -> int:
        """Number of rows that give logits."""
        return (self.batch.logits_rows if self.logits_rows is None else self.logits_rows).size


class MicroBatchSlot:
    """The shared memory of one micro-batch at a time."""

    def __init__(self, descriptor: int) -> None:
        self._memory = SharedMemory(descriptor)
        self._end = 0
        """Where the numbers end, and the rows begin."""

    def write(self, micro: MicroBatch) -> None:
        """Write the numbers of a micro-batch; by the first rank alone, before any other is told of it."""
        arrays = [getattr(micro.batch, name) for name in _FIELDS]
        if micro.logits_rows is not None:
            arrays.append(micro.logits_rows)
        header = np.zeros(_HEADER_WORDS, dtype=np.int64)
        header[:2] = micro.task, len(arrays)
        end, word = _HEADER_WORDS * _WORD, 3
        places = []
        for array in arrays:
            header[word : word + 2] = _DTYPES.index(array.dtype), array.ndim
            header[word + 2 : word + 2 + array.ndim] = array.shape
            word += 2 + _MOST_DIMENSIONS
            places.append(end)
            end = _behind(end, array.nbytes)
        header[2] = self._end = end
        memory = self._memory.at_least(end).numpy()
        memory[: header.nbytes] = header.view(np.uint8)
        for place, array in zip(places, arrays, strict=True):
            memory[place : place + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)

    def read(self) -> MicroBatch:
        """The micro-batch of this slot, with copies of its numbers."""
        size = _HEADER_WORDS * _WORD
        header = self._memory.at_least(size).numpy()[:size].view(np.int64)
        self._end = int(header[2])
        memory = self._memory.at_least(self._end).numpy()
        arrays: list[Array] = []
        start, word = size, 3
        for _ in range(int(header[1])):
            dtype, ndim = _DTYPES[int(header[word])], int(header[word + 1])
            shape = header[word + 2 : word + 2 + ndim].tolist()
            num_bytes = int(np.prod(shape)) * dtype.itemsize
            arrays.append(memory[start : start + num_bytes].view(dtype).reshape(shape).copy())
            start = _behind(start, num_bytes)
            word += 2 + _MOST_DIMENSIONS
        rows = arrays[len(_FIELDS)] if len(arrays) > len(_FIELDS) else None
        return MicroBatch(Task(int(header[0])), FlatBatch(*arrays[: len(_FIELDS)]), rows)

    def rows(self, num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """The rows [num_rows, width] between two stages, which each stage replaces by its own; of the current batch."""
        return self._matrix(self._end, num_rows, width, dtype)

    def results(self, num_rows: int, embedding_size: int, num_logits: int, dtype: torch.dtype) -> ModelOutput:
        """The results of the last stage: hidden states in `dtype`, and float32 logits; in place of the rows."""
        logits_from = _behind(self._end, num_rows * embedding_size * dtype.itemsize)
        logits = self._matrix(logits_from, num_rows, num_logits, torch.float32)
        return ModelOutput(self._matrix(self._end, num_rows, embedding_size, dtype), logits)

    def trim(self) -> None:
        """Give back what an unusually large micro-batch took; by the first rank, once nobody uses the slot."""
        self._memory.trim()

    def _matrix(self, start: int, num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        size = num_rows * width * dtype.itemsize
        return self._memory.at_least(start + size)[start : start + size].view(dtype).view(num_rows, width)


class SlotsInTurns:
    """The slots of a model's micro-batches, which all ranks use in the same order."""

    def __init__(self, descriptors: Sequence[int]) -> None:
        self._slots = [MicroBatchSlot(descriptor) for descriptor in descriptors]
        self._number = 0

    def __len__(self) -> int:
        return len(self._slots)

    def next(self) -> MicroBatchSlot:
        """The slot of the next micro-batch; every rank calls it once for each."""
        slot = self._slots[self._number % len(self._slots)]
        self._number += 1
        return slot


def _behind(start: int, num_bytes: int) -> int:
    """The next aligned place behind `num_bytes` bytes from `start` on."""
    return -(-(start + num_bytes) // _ALIGNMENT) * _ALIGNMENT
