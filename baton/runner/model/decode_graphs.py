"""Decode steps as CUDA graphs: the few hundred kernels of a step, recorded once and started as one.

A decode step's kernels are so short that starting them one by one takes longer than running them. A graph replays them
on the same memory. So each of a few batch sizes has input and output buffers that stay in place. All graphs share the
memory for intermediate results, so a result must be read before the next replay. A batch is padded to the next size
with rows that read and write only the null block. How attention is dealt to programs is in buffers, too
(attention_work/dealing.py); steps for which it starts other kernels have graphs of their own.

Graphs need attention to take the "triton" way of cuda_operations.py; the plain one reads numbers back from the device,
which can't be recorded. No kernel's bits depend on the number of rows, so a row's are those of a step without graphs;
the check at start compares them.

vLLM and SGLang do the same. See https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from baton.runner.backends.attention_call import StepLayout
from baton.runner.backends.attention_work.dealing import Launch, WorkKind
from baton.runner.backends.attention_work.step_work import KeptWork, StepWork
from baton.runner.backends.cuda.cuda_operations import CudaOperations
from baton.runner.backends.cuda.graph_recording import Graph, Record
from baton.runner.execution.input_batch import FlatBatch
from baton.runner.model.attention import PagedAttention

_log = logging.getLogger(__name__)

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
"""Batch sizes that have graphs. Larger batches keep a GPU busy without a graph."""

Layers = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Computes logits [S, vocabulary], in float32, from x [T, hidden], cosines and sines [T, R], and rows that sample; in a
stage before the last one rows [T, hidden]."""


_Launches = tuple[tuple[Launch, ...], ...]
"""What is launched for each group and kind of layers."""


class DecodeGraphs:
    """One graph for each batch size that was needed so far, and what is launched for it. Called from one thread."""

    def __init__(
        self,
        operations: CudaOperations,
        attention: PagedAttention,
        layers: Layers,
        max_model_len: int,
        block_size: int,
    ) -> None:
        self._operations = operations
        self._attention = attention
        self._layers = layers
        self._table_width = -(-max_model_len // block_size)
        self._max_model_len = max_model_len
        self._record: Record | None = operations.record
        self._sized: dict[tuple[int, _Launches], _SizedGraph] = {}
        self._kinds: list[tuple[WorkKind, ...]] = []
        """The kinds of layers of each group, as far as a graph was recorded."""
        self.num_replays = 0
        self.why_not = "" if self._record is not None else "this device has no recorder of graphs"
        """Why decode steps don't run as graphs; empty when they do."""

    @property
    def sizes(self) -> list[int]:
        """Batch sizes that have a graph."""
        return sorted({size for size, _ in self._sized})

    def forget(self) -> None:
        """Forget all graphs: how the operations compute has changed, and a replay would not know."""
        self._sized.clear()

    def fits(self, batch: FlatBatch, logits_rows: npt.NDArray[np.int64]) -> bool:
        """Whether a graph can compute this step: one token of each of a few sequences, and logits of all in order."""
        size = batch.seq_lens.size
        return (
            self._record is not None
            and 0 < size <= SIZES[-1]
            and int(batch.query_start[-1]) == size
            and np.array_equal(logits_rows, np.arange(size))
            and batch.block_tables.shape[2] <= self._table_width
            and self._operations.ways == {"triton"}
        )

    def compute(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        batch: FlatBatch,
        work: Sequence[StepWork],
    ) -> torch.Tensor | None:
        """Logits [B, vocabulary], or rows; None when the step can't be recorded after all.

        They must be read before the next call. `work`: that of each group of layers.
        """
        count = batch.seq_lens.size
        size = next(size for size in SIZES if size >= count)
        work = [each.padded(size) for each in work]
        sized = self._sized.get((size, self._launches(work)))
        if sized is None:
            kept = [KeptWork(each, self._max_model_len, x.device) for each in work]
            sized = _SizedGraph(size, x, cos, kept, self._table_width)
        sized.fill(x[:count], cos[:count], sin[:count], batch, work)
        if sized.graph is None:
            if not self._recorded(sized):
                return None
            self._kinds = [each.kinds for each in sized.work]
            self._sized[size, self._launches(work)] = sized
        assert sized.graph is not None
        assert sized.logits is not None
        sized.graph.replay()
        self.num_replays += 1
        return sized.logits[:count]

    def _launches(self, work: Sequence[StepWork]) -> _Launches:
        if not self._kinds:
            return ()
        return tuple(each.dealt(kind).launches for each, kinds in zip(work, self._kinds, strict=True) for kind in kinds)

    def _recorded(self, sized: _SizedGraph) -> bool:
        assert self._record is not None
        before = self._attention.layout
        try:
            sized.graph, sized.logits = self._record(lambda: self._run(sized))
        except Exception as error:  # of torch, or of Triton's compiler
            self._record = None
            self.why_not = str(error)
            _log.warning("decode steps can't be recorded as a CUDA graph and run kernel by kernel: %s", error)
            return False
        finally:
            self._attention.layout = before
        return True

    def _run(self, sized: _SizedGraph) -> torch.Tensor:
        self._attention.layout = sized.layout
        return self._layers(sized.x, sized.cos, sized.sin, sized.rows)


class _SizedGraph:
    """The buffers and the graph of one batch size."""

    def __init__(
        self, size: int, x: torch.Tensor, cos: torch.Tensor, work: Sequence[KeptWork], table_width: int
    ) -> None:
        device, groups = x.device, len(work)
        self.work = work
        self.x = x.new_zeros(size, x.shape[1])
        self.cos, self.sin = (cos.new_zeros(size, cos.shape[1]) for _ in range(2))
        self.rows = torch.arange(size, device=device)
        self._seq_lens = _StagedTensor((size,), np.int32, device)
        self._tables = _StagedTensor((groups, size, table_width), np.int32, device)
        self._slots = _StagedTensor((groups, size), np.int64, device)
        starts = torch.arange(size + 1, dtype=torch.int32, device=device)
        self.layout = StepLayout(
            query_start=starts,
            seq_lens=self._seq_lens.tensor,
            block_tables=list(self._tables.tensor.unbind()),
            slots=list(self._slots.tensor.unbind()),
            sample_start=starts,
            work=work,
            sample_work=work,
        )
        self.graph: Graph | None = None
        self.logits: torch.Tensor | None = None

    def fill(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        batch: FlatBatch,
        work: Sequence[StepWork],
    ) -> None:
        """Copy a batch into the buffers, and fill the rows behind it with sequences of one token in the null block."""
        count = x.shape[0]
        self.x[:count], self.cos[:count], self.sin[:count] = x, cos, sin
        self._seq_lens.array[:count], self._seq_lens.array[count:] = batch.seq_lens, 1
        self._tables.array[:, :count, : batch.block_tables.shape[2]] = batch.block_tables
        self._tables.array[:, count:, 0] = 0
        self._slots.array[:, :count], self._slots.array[:, count:] = batch.slots[:, :count], 0
        for staged in (self._seq_lens, self._tables, self._slots):
            staged.push()
        for kept, each in zip(self.work, work, strict=True):
            kept.take(each)


class _StagedTensor:
    """A tensor at a fixed address on the device, and the pinned host memory from which it is filled."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, device: torch.device) -> None:
        self._host = torch.from_numpy(np.zeros(shape, dtype=dtype))
        if device.type == "cuda":
            self._host = self._host.pin_memory()
        self.array: npt.NDArray[Any] = self._host.numpy()
        self.tensor = torch.zeros(shape, dtype=self._host.dtype, device=device)

    def push(self) -> None:
        """Copy the host memory to the device without waiting: the step's logits are read before it is written again."""
        self.tensor.copy_(self._host, non_blocking=True)
