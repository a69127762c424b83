"""Where the first rank announces each step to the others: a few numbers and arrays in shared memory."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.runner.backends.cpu.kernels.barrier import BarrierTag
from baton.runner.backends.ranks.host_ranks import HostRanks, SharedFiles
from baton.runner.backends.ranks.shared_memory import SharedMemory
from baton.runner.execution.input_batch import FlatBatch

Array = npt.NDArray[Any]

_WORD = 8
_HEADER_WORDS = 128
_MOST_DIMENSIONS = 3
"""The most dimensions of an array."""
_FIELDS = tuple(field.name for field in fields(FlatBatch))
_DTYPES = (np.dtype(np.int64), np.dtype(np.int32))


class Task(enum.IntEnum):
    """What all ranks compute next, from what `arrays_of` returns."""

    LOGITS = 1
    LOGITS_AND_HIDDEN = 2


class StepBoard:
    """One rank's view of the steps: the first rank announces one, the others wait for it, then all wait for its end."""

    def __init__(self, ranks: HostRanks, files: SharedFiles) -> None:
        self._ranks = ranks
        self._memory = SharedMemory(files.step)

    def announce(self, task: Task, arrays: Sequence[Array]) -> None:
        """Tell all other ranks what to do; returns when all have come for it. Raises RankLost."""
        header = np.zeros(_HEADER_WORDS, dtype=np.int64)
        header[:2] = task, len(arrays)
        end, word = _HEADER_WORDS * _WORD, 3
        places = []
        for array in arrays:
            header[word : word + 2] = _DTYPES.index(array.dtype), array.ndim
            header[word + 2 : word + 2 + array.ndim] = array.shape
            word += 2 + _MOST_DIMENSIONS
            places.append(end)
            end += -(-array.nbytes // _WORD) * _WORD
        header[2] = end
        memory = self._memory.at_least(end).numpy()
        memory[: header.nbytes] = header.view(np.uint8)
        for place, array in zip(places, arrays, strict=True):
            memory[place : place + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._ranks.barrier.wait(BarrierTag.STEP)

    def done(self) -> None:
        """Wait until the step is done on all ranks: the first one may copy blocks, and offer them. Raises RankLost."""
        self._ranks.barrier.wait(BarrierTag.DONE)

    def next(self) -> tuple[Task, list[Array]]:
        """Wait for the next announcement; returns it with copies of its arrays. Raises RankLost."""
        self._ranks.barrier.wait(BarrierTag.STEP)
        size = _HEADER_WORDS * _WORD
        header = self._memory.at_least(size).numpy()[:size].view(np.int64)
        memory = self._memory.at_least(int(header[2])).numpy()
        arrays = []
        start, word = size, 3
        for _ in range(int(header[1])):
            dtype, ndim = _DTYPES[int(header[word])], int(header[word + 1])
            shape = header[word + 2 : word + 2 + ndim].tolist()
            num_bytes = int(np.prod(shape)) * dtype.itemsize
            arrays.append(memory[start : start + num_bytes].view(dtype).reshape(shape).copy())
            start += -(-num_bytes // _WORD) * _WORD
            word += 2 + _MOST_DIMENSIONS
        return Task(int(header[0])), arrays


def arrays_of(batch: FlatBatch, logits_rows: Array | None) -> list[Array]:
    """What `batch_of` takes: the fields of a batch in order, and the rows that give logits, if they are given."""
    arrays = [getattr(batch, name) for name in _FIELDS]
    return arrays if logits_rows is None else [*arrays, logits_rows]


def batch_of(arrays: Sequence[Array]) -> tuple[FlatBatch, Array | None]:
    """The batch with these arrays, and the rows that give logits; None: those that sample."""
    rows = arrays[len(_FIELDS)] if len(arrays) > len(_FIELDS) else None
    return FlatBatch(*arrays[: len(_FIELDS)]), rows
