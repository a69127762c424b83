"""The operations on a GPU: torch's products in calls of one number of rows, attention and norms in kernels of our own.

There are two ways to compute attention. For every kind of layer the first one is tried on random input, and taken if it
runs, gives the plain one's result, and gives a row the same bits alone and in a batch. Rows attend to blocks that they
share together (shared_splits.py) only if that gives the same bits, too:
  triton     kernels that follow the block tables (triton_attention.py)
  plain      row by row, as in TorchOperations: exact and slow; the only one that adds biases of distances

The kernel for norms (triton_norm.py) is tried in the same way. Without it torch computes them, whose bits depend on the
number of rows, so that the model is hardly bit-exact.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from baton.runner.backends.attention_call import AttentionCall, AttentionFeatures
from baton.runner.backends.cuda.graph_recording import GpuRecorder, Record
from baton.runner.backends.cuda.shared_splits import SPLIT, find_shared_splits
from baton.runner.backends.paged_cache import CacheView, keys_and_values
from baton.runner.backends.torch_operations import TorchOperations

_log = logging.getLogger(__name__)

ROWS_PER_CALL = (128, 256, 64)
"""The numbers of rows that the check at start tries: few enough for a decode step, enough to keep a GPU busy with a
prompt."""

_MOST_HEADS = 8
"""Half of a tile's rows (triton_attention.py)."""
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
    in_chunks: bool
    softcap: float | None
    has_sinks: bool
    has_distance_bias: bool

    @classmethod
    def of(cls, call: AttentionCall) -> _Kind:
        query, cache, how = call.query, call.cache, call.how
        return cls(
            query.dtype,
            query.shape[1],
            cache.num_kv_heads,
            cache.key_dim,
            cache.value_dim,
            cache.block_size,
            how.window,
            how.in_chunks,
            how.softcap,
            how.sinks is not None,
            how.distance_bias is not None,
        )

    @property
    def may_share(self) -> bool:
        """Whether a tile has room for rows of several sequences, each of which sees all keys of a split."""
        return self.window is None and self.num_heads // self.num_kv_heads <= _MOST_HEADS


PagedAttention = Callable[[AttentionCall], torch.Tensor]
"""Computes a causal call without biases of distances, without reading from the device, in one order of summation for
every row.

Implemented by `triton_attention.triton_attention` and, for tests, by `tests.doubles.fake_attention`."""


def _triton_attention(call: AttentionCall) -> torch.Tensor:
    # Triton is there only where torch was built for GPUs.
    from baton.runner.backends.cuda.triton_attention import triton_attention

    return triton_attention(call)


Norm = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor, float, bool], tuple[torch.Tensor, torch.Tensor]]
"""Computes x + residual, if there is one, and its `Operations.rms_norm`, from x, residual, weight, eps and plus_one, in
one order of summation for every row. Implemented by `triton_norm.triton_norm`."""


def _triton_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, plus_one: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    from baton.runner.backends.cuda.triton_norm import triton_norm

    return triton_norm(x, residual, weight, eps, plus_one)


class CudaOperations(TorchOperations):
    """The operations on one GPU. Called from one thread."""

    packs_quantized = False  # quantised weights are dequantised when they are loaded: there is no kernel for them here

    def __init__(
        self,
        device: torch.device,
        attend: PagedAttention = _triton_attention,
        record: Record | None = None,
        norm: Norm | None = None,
    ) -> None:
        """`norm`: None for the kernel's on a GPU, and torch's elsewhere."""
        super().__init__(num_threads=1)
        self.rows_per_call = ROWS_PER_CALL[0]
        self.rows_to_try = ROWS_PER_CALL
        self._device = device
        self._attend = attend
        self.record = GpuRecorder() if record is None and device.type == "cuda" else record
        """Records decode steps as CUDA graphs; None: they are not recorded."""
        self._norm = _triton_norm if norm is None and device.type == "cuda" else norm
        self._tried_norms: set[tuple[torch.dtype, int]] = set()
        """The dtypes and widths with which the kernel for norms has been tried."""
        self._ways: dict[_Kind, str] = {}
        self._together: set[_Kind] = set()
        self.why_plain = ""
        """Why the latest kind of layer that takes the plain way does not take a faster one."""

    @property
    def device_name(self) -> str:
        return torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else self._device.type

    @property
    def ways(self) -> set[str]:
        """The ways that layers take, as far as they have been called."""
        return set(self._ways.values())

    @property
    def attends_together(self) -> bool:
        """Whether there are layers in which rows attend together to the blocks that they share."""
        return bool(self._together)

    def store_kv(self, key: torch.Tensor, value: torch.Tensor | None, cache: CacheView, slots: torch.Tensor) -> None:
        keys, values = keys_and_values(cache)
        # Rows without a slot are written to the null block, which no query attends to. To leave them out, their number
        # would have to be read from the GPU.
        slots = slots.clamp(min=0)
        blocks, offsets = slots // cache.block_size, slots % cache.block_size
        keys[blocks, :, offsets] = key
        if value is not None:
            values[blocks, :, offsets] = value

    def numerics(self) -> str:
        ways = "+".join(sorted(self.ways))
        norms = "torch" if self._norm is None else "triton"
        return f"{self.product_numerics()}-{ways}-norms-{norms}"

    def product_numerics(self) -> str:
        return f"torch-4-{self.device_name.replace(' ', '-')}-rows-{self.rows_per_call}"

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, *, plus_one: bool = False) -> torch.Tensor:
        norm = self._norm_for(x)
        if norm is None:
            return super().rms_norm(x, weight, eps, plus_one=plus_one)
        return norm(x, None, weight, eps, plus_one)[1]

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, plus_one: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        norm = self._norm_for(x)
        if norm is None:
            return super().add_rms_norm(x, residual, weight, eps, plus_one=plus_one)
        return norm(x, residual, weight, eps, plus_one)

    def _norm_for(self, x: torch.Tensor) -> Norm | None:
        """The kernel for norms of this dtype and width; None if torch computes them."""
        tried = (x.dtype, x.shape[-1])
        if self._norm is not None and tried not in self._tried_norms:
            self._tried_norms.add(tried)
            if reason := self._why_no_norm(self._norm, *tried):
                _log.warning("torch computes norms, whose bits depend on the number of rows: %s", reason)
                self._norm = None
        return self._norm

    def _why_no_norm(self, norm: Norm, dtype: torch.dtype, width: int) -> str:
        """Why a kernel can't compute norms here; empty if it can."""
        generator = torch.Generator().manual_seed(0)
        x, residual = torch.randn(2, _SAMPLE_NORMS, width, generator=generator).to(self._device, dtype)
        weight, eps = torch.ones(width, dtype=dtype, device=self._device), 1e-6
        try:
            together = norm(x, residual, weight, eps, False)
            alone = norm(x[-1:], residual[-1:], weight, eps, False)
        except Exception as error:  # of Triton's compiler or of the driver
            return f"Triton's kernel fails with {type(error).__name__} ({(str(error).splitlines() or [''])[0]:.200})"
        expected = super().add_rms_norm(x, residual, weight, eps)
        tolerance = _TOLERANCE[dtype]
        for normed, wanted, lone in zip(together, expected, alone, strict=True):
            if not torch.allclose(normed.float(), wanted.float(), atol=tolerance, rtol=tolerance):
                return "the result of Triton's kernel differs from torch's"
            if not torch.equal(normed[-1:], lone):
                return "Triton's kernel gives a row other bits alone than in a batch"
        return ""

    def _float32_product(self, rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        # On a GPU torch returns the float32 sums of narrower operands, which need not be widened.
        if rows.device.type == "cuda":
            return torch.mm(rows, matrix.T, out_dtype=torch.float32)
        return super()._float32_product(rows, matrix)

    def paged_attention(self, call: AttentionCall) -> torch.Tensor:
        if call.how.ahead or call.cache.values_in_keys or call.selected is not None:
            # Only encoders look ahead, and Triton's kernel is causal. It does not read values of keys either.
            return super().paged_attention(call)
        kind = _Kind.of(call)
        way = self._ways.get(kind)
        if way is None:
            way = self._ways[kind] = self._choose(kind)
        if way == "plain":
            return super().paged_attention(call)
        may_share = call.sharing is None or kind in self._together
        return self._attend(call if may_share else replace(call, sharing=None))

    def _choose(self, kind: _Kind) -> str:
        if kind.has_distance_bias:
            self.why_plain = "Triton's kernel adds no biases to scores"
            return "plain"
        sample = _sample(kind, self._device)
        expected = super().paged_attention(sample)
        try:
            out = self._attend(sample)
            alone = self._attend(_last_alone(sample))
        except Exception as error:  # of torch, of Triton's compiler or of the driver: not on this device or this shape
            lines = str(error).splitlines() or [""]
            self.why_plain = f"Triton's kernel fails with {type(error).__name__} ({lines[0]:.200})"
            return "plain"
        tolerance = _TOLERANCE[kind.dtype]
        if not torch.allclose(out.float(), expected.float(), atol=tolerance, rtol=tolerance):
            self.why_plain = "the result of Triton's kernel differs from that of plain attention"
        elif not torch.equal(out[-1:], alone):
            self.why_plain = "Triton's kernel gives a row other bits alone than in a batch"
        else:
            if kind.may_share and self._shares(sample):
                self._together.add(kind)
            return "triton"
        return "plain"

    def _shares(self, sample: AttentionCall) -> bool:
        """Whether rows of the sample that share blocks have the same bits as without sharing."""
        shared = _sharers(sample)
        tables, lengths = shared.block_tables.cpu().numpy(), shared.seq_lens.cpu().numpy()
        sharing = find_shared_splits(tables, lengths, shared.cache.block_size)
        assert sharing is not None
        try:
            together = self._attend(replace(shared, sharing=torch.from_numpy(sharing).to(self._device)))
            if torch.equal(together, self._attend(shared)):
                return True
            reason = "a row gets other bits"
        except Exception as error:  # as above
            reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]:.200}"
        _log.warning("rows don't attend together to the blocks that they share: %s", reason)
        return False


_SAMPLE_NORMS = 19
"""The rows of which a sample of norms is computed."""
_SAMPLE_LENGTHS, _SAMPLE_QUERIES = (3, 40, 1100), (3, 1, 18)
"""The keys and the queries of the sample's sequences. Those of the last one fill more than one tile, and see keys of
three splits (triton_attention.py)."""


def _sample(kind: _Kind, device: torch.device) -> AttentionCall:
    """A call with random input, with shuffled blocks."""
    generator = torch.Generator().manual_seed(0)
    width = -(-max(_SAMPLE_LENGTHS) // kind.block_size)
    num_blocks = len(_SAMPLE_LENGTHS) * width + 1
    keys, values = (kind.num_kv_heads * kind.block_size * dim for dim in (kind.key_dim, kind.value_dim))
    memory = torch.randn(num_blocks * (keys + values), generator=generator).to(device, kind.dtype)
    cache = CacheView(
        memory=memory,
        num_blocks=num_blocks,
        block_stride=keys + values,
        key_offset=0,
        value_offset=keys,
        num_kv_heads=kind.num_kv_heads,
        block_size=kind.block_size,
        key_dim=kind.key_dim,
        value_dim=kind.value_dim,
    )
    query = torch.randn(sum(_SAMPLE_QUERIES), kind.num_heads, kind.key_dim, generator=generator).to(device, kind.dtype)
    tables = torch.randperm(num_blocks - 1, generator=generator).view(-1, width).to(device, torch.int32) + 1
    starts = torch.tensor([0, *itertools.accumulate(_SAMPLE_QUERIES)], dtype=torch.int32, device=device)
    lengths = torch.tensor(_SAMPLE_LENGTHS, dtype=torch.int32, device=device)
    sinks = torch.randn(kind.num_heads, generator=generator).to(device, kind.dtype) if kind.has_sinks else None
    how = AttentionFeatures(kind.key_dim**-0.5, kind.window, kind.softcap, sinks, in_chunks=kind.in_chunks)
    return AttentionCall(query, cache, starts, lengths, tables, how)


def _last_alone(sample: AttentionCall) -> AttentionCall:
    """The last row of a sample as the only one of a step."""
    return replace(
        sample,
        query=sample.query[-1:],
        query_start=sample.query_start[:2].clamp(max=1),
        seq_lens=sample.seq_lens[-1:],
        block_tables=sample.block_tables[-1:],
    )


def _sharers(sample: AttentionCall) -> AttentionCall:
    """Decode rows of three sequences that begin with the blocks of the sample's last one, and see all of a split."""
    device, lengths = sample.query.device, [sample.seq_lens[-1], SPLIT, 2 * SPLIT + 6]
    return replace(
        sample,
        query=sample.query[-3:],
        query_start=torch.arange(4, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        block_tables=sample.block_tables[-1:].expand(3, -1).contiguous(),
    )
