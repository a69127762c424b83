"""Where a step, or a micro-batch of one, is while the ranks of a stage compute it: its numbers and its rows.

The first rank writes, and the others read.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from baton.runner.backends.ranks.host_ranks import SharedMemory
from baton.runner.model.stage import StageReport, reports_from_json, reports_to_json
from baton.runner.ranks.micro_batch import MicroBatch, read_numbers, write_numbers

_LENGTH_BYTES = 8


class StepSlot:
    """The memory of one step at a time, which the ranks of a stage share."""

    def __init__(self, descriptor: int) -> None:
        """`descriptor`: of a file from `make_shared_file`."""
        self._memory = SharedMemory(descriptor)
        self._end = 0
        """Where the numbers end, and the rows begin."""

    def write(self, micro: MicroBatch, received: torch.Tensor | None) -> None:
        """Write a micro-batch, and the rows [T, hidden size] of the stage before; by the first rank alone, before any
        other is told of it, and when none uses the one before."""
        self._memory.trim()
        self._end = write_numbers(micro, self._bytes)
        if received is not None:
            self._rows(received.shape[0], received.shape[1], received.dtype).copy_(received)

    def read(self) -> MicroBatch:
        """The micro-batch, with copies of its numbers."""
        micro, self._end = read_numbers(self._bytes)
        return micro

    def received(self, num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """A copy of the rows [num_rows, width] of the stage before, which belong to what was read last."""
        return self._rows(num_rows, width, dtype).clone()

    def write_reports(self, reports: list[StageReport]) -> None:
        """Write the reports of all stages, as `write` does a micro-batch."""
        text = reports_to_json(reports)
        written = len(text).to_bytes(_LENGTH_BYTES, "little") + text
        self._bytes(len(written))[: len(written)].data[:] = written

    def read_reports(self) -> list[StageReport]:
        """The reports that were written."""
        end = _LENGTH_BYTES + int.from_bytes(self._bytes(_LENGTH_BYTES)[:_LENGTH_BYTES].data, "little")
        return reports_from_json(bytes(self._bytes(end)[_LENGTH_BYTES:end].data))

    def _bytes(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        memory: npt.NDArray[np.uint8] = self._memory.at_least(num_bytes).numpy()
        return memory

    def _rows(self, num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        end = self._end + num_rows * width * dtype.itemsize
        return self._memory.at_least(end)[self._end : end].view(dtype).view(num_rows, width)
