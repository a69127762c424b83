"""Where a micro-batch is while ranks of one host compute it: its numbers, its rows between two stages, and its results.

The first rank writes the numbers, and all ranks of all stages read them. Each computes its part from the slot to the
slot, unless the model has one stage.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from baton.runner.backends.ranks.host_ranks import SharedMemory
from baton.runner.model.decoder import ModelOutput
from baton.runner.model.transformer import Transformer
from baton.runner.parts import Shard
from baton.runner.ranks.micro_batch import MicroBatch, Task, aligned_behind, read_numbers, write_numbers


class MicroBatchSlot:
    """The shared memory of one micro-batch at a time."""

    def __init__(self, descriptor: int) -> None:
        self._memory = SharedMemory(descriptor)
        self._end = 0
        """Where the numbers end, and the rows begin."""

    def write(self, micro: MicroBatch) -> None:
        """Write the numbers of a micro-batch; by the first rank alone, before any other is told of it."""
        self._end = write_numbers(micro, self._bytes)

    def read(self) -> MicroBatch:
        """The micro-batch of this slot, with copies of its numbers."""
        micro, self._end = read_numbers(self._bytes)
        return micro

    def _bytes(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        found: npt.NDArray[np.uint8] = self._memory.at_least(num_bytes).numpy()
        return found

    def rows(self, num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """The rows [num_rows, width] between two stages, which each stage replaces by its own; of the current batch."""
        return self._matrix(self._end, num_rows, width, dtype)

    def results(self, num_rows: int, embedding_size: int, num_logits: int, dtype: torch.dtype) -> ModelOutput:
        """The results of the last stage: hidden states in `dtype`, and float32 logits; in place of the rows."""
        logits_from = aligned_behind(self._end, num_rows * embedding_size * dtype.itemsize)
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


def compute_part(transformer: Transformer, shard: Shard, slot: MicroBatchSlot, micro: MicroBatch) -> ModelOutput:
    """Compute one rank's part of a micro-batch, and return it.

    Of several stages the first rank of each leaves in the slot what comes next: rows for the stage behind, or results.
    """
    stage, num_rows = transformer.stage, micro.batch.token_ids.size
    # Copied, since the first rank of the stage replaces them while the others may still be computing.
    received = None if stage.is_first else slot.rows(num_rows, transformer.width, transformer.dtype).clone()
    out = transformer.compute_stage(micro.batch, micro.logits_rows, received)
    if stage.count == 1 or shard.rank > 0:
        return out
    if stage.is_last:
        results = results_in(transformer, slot, micro)
        results.logits.copy_(out.logits)
        if micro.task is Task.LOGITS_AND_HIDDEN:
            results.hidden.copy_(out.hidden)
    else:
        slot.rows(num_rows, transformer.width, transformer.dtype).copy_(out.hidden)
    return out


def results_in(transformer: Transformer, slot: MicroBatchSlot, micro: MicroBatch) -> ModelOutput:
    """The results of a micro-batch in its slot; hidden states are there if its task has them."""
    return slot.results(micro.num_results, transformer.embedding_size, transformer.num_logits, transformer.dtype)
