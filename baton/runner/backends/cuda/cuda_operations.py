"""The operations on a GPU: torch's products in calls of one number of rows, and its FlashAttention on the paged cache.

There are three ways to compute attention. For every kind of layer they are tried in this order on random input, and the
first one that runs and gives the plain one's result is taken:
  paged      FlashAttention, which follows the block tables itself (torch.nn.attention.varlen)
  gathered   FlashAttention on keys and values that are gathered from the blocks first
  plain      row by row, as in TorchOperations: exact and slow
FlashAttention's splits over keys are off (num_splits=1), since they depend on the longest sequence of the batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from baton.runner.backends.cache_rows import keys_and_values
from baton.runner.backends.cpu.kernels.cache import CacheView
from baton.runner.backends.cpu.kernels.step_layout import StepLayout
from baton.runner.backends.cuda.graph_recording import GpuRecorder, Record
from baton.runner.backends.torch_operations import TorchOperations

ROWS_PER_CALL = (128, 256, 64)
"""The numbers of rows that the check at start tries: few enough for a decode step, enough to keep a GPU busy with a
prompt."""

_TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True, slots=True)
class _Kind:
    """The properties of a layer that decide which ways its attention can be computed in."""

    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    block_size: int
    window: int | None
    softcap: float | None
    has_sinks: bool


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    """The sizes of one step, which are read from the device once and used by every layer."""

    query_start: torch.Tensor
    seq_lens: torch.Tensor
    num_rows: int
    longest_query: int
    longest_sequence: int


FlashKernel = Callable[..., Any]
"""Called as torch.nn.attention.varlen.varlen_attn is."""


def _torch_flash(*arguments: Any, **keywords: Any) -> Any:
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn(*arguments, **keywords)


_Way = Callable[..., torch.Tensor]


class CudaOperations(TorchOperations):
    """The operations on one GPU. Called from one thread."""

    packs_quantized = False  # quantised weights are dequantised when they are loaded: there is no kernel for them here

    def __init__(self, device: torch.device, flash: FlashKernel = _torch_flash, record: Record | None = None) -> None:
        super().__init__(num_threads=1)
        self.rows_per_call = ROWS_PER_CALL[0]
        self.rows_to_try = ROWS_PER_CALL
        self._device = device
        self._flash = flash
        self.record = GpuRecorder() if record is None and device.type == "cuda" else record
        """Records decode steps as CUDA graphs; None: they are not recorded."""
        self._ways: dict[_Kind, str] = {}
        self.why_plain = ""
        """Why the latest kind of layer that takes the plain way does not take a faster one."""
        self._batch: _Batch | None = None

    @property
    def device_name(self) -> str:
        return torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else self._device.type

    @property
    def ways(self) -> set[str]:
        """The ways that layers take, as far as they have been called."""
        return set(self._ways.values())

    def assume_decodes(self, layout: StepLayout, longest_sequence: int) -> None:
        """Declare that a layout has one row for each sequence, with at most `longest_sequence` keys.

        So its sizes need not be read from the device.
        """
        self._batch = _Batch(layout.query_start, layout.seq_lens, layout.seq_lens.shape[0], 1, longest_sequence)

    def store_kv(self, key: torch.Tensor, value: torch.Tensor, cache: CacheView, slots: torch.Tensor) -> None:
        keys, values = keys_and_values(cache)
        # Rows without a slot are written to the null block, which no query attends to. To leave them out, their number
        # would have to be read from the GPU.
        slots = slots.clamp(min=0)
        blocks, offsets = slots // cache.block_size, slots % cache.block_size
        keys[blocks, :, offsets] = key
        values[blocks, :, offsets] = value

    def numerics(self) -> str:
        ways = "+".join(sorted(self.ways))
        return f"torch-2-{self.device_name.replace(' ', '-')}-rows-{self.rows_per_call}-{ways}"

    def _float32_product(self, rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        # On a GPU torch returns the float32 sums of narrower operands, which need not be widened.
        if rows.device.type == "cuda":
            return torch.mm(rows, matrix.T, out_dtype=torch.float32)
        return super()._float32_product(rows, matrix)

    def paged_attention(
        self,
        query: torch.Tensor,
        cache: CacheView,
        query_start: torch.Tensor,
        seq_lens: torch.Tensor,
        block_tables: torch.Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        heads = query.shape[1]
        kind = _Kind(
            query.dtype,
            heads,
            cache.num_kv_heads,
            cache.key_dim,
            cache.value_dim,
            cache.block_size,
            window,
            softcap,
            sinks is not None,
        )
        way = self._ways.get(kind)
        if way is None:
            way = self._ways[kind] = self._choose(kind)
        if way == "plain":
            return super().paged_attention(
                query,
                cache,
                query_start,
                seq_lens,
                block_tables,
                scale=scale,
                window=window,
                softcap=softcap,
                sinks=sinks,
            )
        batch = self._known_batch(query_start, seq_lens)
        out = query.new_zeros(query.shape[0], heads, cache.value_dim)
        if batch.num_rows:
            attend: _Way = _paged if way == "paged" else _gathered
            out[: batch.num_rows] = attend(
                self._flash, query[: batch.num_rows], cache, batch, block_tables, scale, window
            )
        return out

    def _known_batch(self, query_start: torch.Tensor, seq_lens: torch.Tensor) -> _Batch:
        known = self._batch
        # Reading a number from a GPU waits for all its queued work, so it is done once a step and not once a layer.
        if known is None or known.query_start is not query_start or known.seq_lens is not seq_lens:
            starts = query_start.tolist()
            counts = [after - before for before, after in itertools.pairwise(starts)]
            longest = max(seq_lens.tolist(), default=0)
            known = self._batch = _Batch(query_start, seq_lens, starts[-1], max(counts, default=0), longest)
        return known

    def _choose(self, kind: _Kind) -> str:
        if kind.softcap or kind.has_sinks or kind.key_dim != kind.value_dim:
            self.why_plain = "torch's FlashAttention has no soft caps, no sinks, and one width for keys and values"
            return "plain"
        reasons = []
        sample = _sample(kind, self._device)
        expected = super().paged_attention(*sample, scale=0.3, window=kind.window)
        query, cache, query_start, seq_lens, block_tables = sample
        batch = _Batch(query_start, seq_lens, query.shape[0], 3, 40)
        ways: tuple[tuple[str, _Way], ...] = (("paged", _paged), ("gathered", _gathered))
        for name, attend in ways:
            try:
                out = attend(self._flash, query, cache, batch, block_tables, 0.3, kind.window)
            except (RuntimeError, NotImplementedError, ValueError) as error:
                reasons.append(f"{name}: {error}")  # not on this device, or not for this shape
                continue
            if torch.allclose(out.float(), expected.float(), atol=_TOLERANCE[kind.dtype], rtol=_TOLERANCE[kind.dtype]):
                return name
            reasons.append(f"{name}: its result differs from that of plain attention")
        self.why_plain = "; ".join(reasons)
        return "plain"


def _bounds(window: int | None) -> tuple[int, int]:
    """How many keys before and after its own a query attends to; -1: all keys."""
    return (window - 1 if window else -1), 0


def _paged(
    flash: FlashKernel,
    query: torch.Tensor,
    cache: CacheView,
    batch: _Batch,
    block_tables: torch.Tensor,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    keys, values = keys_and_values(cache)
    out: torch.Tensor = flash(
        query,
        keys.transpose(1, 2),
        values.transpose(1, 2),
        batch.query_start,
        None,
        batch.longest_query,
        batch.longest_sequence,
        scale=scale,
        window_size=_bounds(window),
        enable_gqa=True,
        seqused_k=batch.seq_lens,
        block_table=block_tables,
        num_splits=1,
    )
    return out


def _gathered(
    flash: FlashKernel,
    query: torch.Tensor,
    cache: CacheView,
    batch: _Batch,
    block_tables: torch.Tensor,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    lengths = batch.seq_lens.tolist()
    pieces = []
    for views in keys_and_values(cache):
        parts = []
        for sequence, length in enumerate(lengths):
            blocks = block_tables[sequence, : -(-length // cache.block_size)].long()
            parts.append(views[blocks].transpose(1, 2).flatten(0, 1)[:length])
        pieces.append(torch.cat(parts))
    key_start = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=query.device)
    key_start[1:] = batch.seq_lens.cumsum(0)
    out: torch.Tensor = flash(
        query,
        *pieces,
        batch.query_start,
        key_start,
        batch.longest_query,
        batch.longest_sequence,
        scale=scale,
        window_size=_bounds(window),
        enable_gqa=True,
        num_splits=1,
    )
    return out


def _sample(
    kind: _Kind, device: torch.device
) -> tuple[torch.Tensor, CacheView, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random input: three sequences of 3, 40 and 17 keys, whose last 3, 1 and 2 are queries; shuffled blocks."""
    generator = torch.Generator().manual_seed(0)
    width = -(-40 // kind.block_size)
    num_blocks = 3 * width + 1
    half = kind.num_kv_heads * kind.block_size * kind.key_dim
    memory = torch.randn(num_blocks * 2 * half, generator=generator).to(device, kind.dtype)
    cache = CacheView(
        memory=memory,
        num_blocks=num_blocks,
        block_stride=2 * half,
        key_offset=0,
        value_offset=half,
        num_kv_heads=kind.num_kv_heads,
        block_size=kind.block_size,
        key_dim=kind.key_dim,
        value_dim=kind.value_dim,
    )
    query = torch.randn(6, kind.num_heads, kind.key_dim, generator=generator).to(device, kind.dtype)
    tables = torch.randperm(3 * width, generator=generator).view(3, width).to(device, torch.int32) + 1
    query_start = torch.tensor([0, 3, 4, 6], dtype=torch.int32, device=device)
    seq_lens = torch.tensor([3, 40, 17], dtype=torch.int32, device=device)
    return query, cache, query_start, seq_lens, tables
