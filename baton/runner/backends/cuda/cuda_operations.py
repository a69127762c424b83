"""The operations on a GPU: kernels of our own for products, norms, heads and attention; torch for what is left.

Each kernel is tried on the GPU before it is used: what computes attention is chosen by kind of layer
(attention_choice.py), products have tiles (products.py), and kernels of rows are taken or left (row_kernels.py). In
their place torch computes products in calls of one number of rows, and norms whose bits depend on the number of rows,
so that the model is hardly bit-exact.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from baton.runner.backends.attention_call import AttentionCall
from baton.runner.backends.cpu.kernels.product import Activation, Ungated
from baton.runner.backends.cuda.attention_choice import AttentionChoice
from baton.runner.backends.cuda.graph_recording import Record
from baton.runner.backends.cuda.kernels import Kernels
from baton.runner.backends.cuda.mixtures import MixtureProducts, StackedExperts
from baton.runner.backends.cuda.numerics import Gpu, gpu_numerics
from baton.runner.backends.cuda.product_tiles import Tile
from baton.runner.backends.cuda.products import ProductsFail, TiledProducts
from baton.runner.backends.cuda.row_kernels import HeadChoice, NormChoice
from baton.runner.backends.head_rows import HeadRows
from baton.runner.backends.low_rank import RowAdapters
from baton.runner.backends.paged_cache import CacheView, keys_and_values, write_rows
from baton.runner.backends.routing import (
    PLAIN_EXPERTS,
    ClampedGate,
    ExpertBiases,
    ExpertKind,
    Routing,
    SharedRows,
    choose,
)
from baton.runner.backends.torch_operations import TorchOperations, TorchStack, TorchWeight

_log = logging.getLogger(__name__)

ROWS_PER_CALL = (128, 256, 64)
"""The numbers of rows that the check at start tries where torch computes products: few enough for a decode step, enough
to keep a GPU busy with a prompt."""


class CudaOperations(TorchOperations):
    """The operations on one GPU. Called from one thread."""

    packs_quantized = False  # quantised weights are dequantised when they are loaded: there is no kernel for them here

    def __init__(
        self,
        device: torch.device,
        kernels: Kernels,
        record: Record | None = None,
        tiles: tuple[Tile, ...] | None = None,
    ) -> None:
        """`record`: records decode steps as CUDA graphs; None: they are not recorded. `tiles`: see `TiledProducts`."""
        super().__init__(num_threads=1)
        self.rows_per_call = ROWS_PER_CALL[0]
        self.rows_to_try = ROWS_PER_CALL
        self.record = record
        self.why_products_by_torch = "" if kernels.products else "there is no kernel for them"
        """Why torch computes products; empty while Triton's kernels do."""
        self._device = device
        self._attention = AttentionChoice(device, kernels.attend, super().paged_attention)
        self._norms = NormChoice(device, kernels.norm)
        self._heads = HeadChoice(device, kernels.heads)
        self._products = None
        if kernels.products is not None:
            self._products = TiledProducts(device, kernels.products.multiply, tiles)
            self._gate = kernels.products.gate
        self._mixtures = None
        if self._products is not None and kernels.mixtures is not None:
            self._mixtures = MixtureProducts(device, self._products, kernels.mixtures)

    @property
    def device_name(self) -> str:
        return torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else self._device.type

    @property
    def ways(self) -> set[str]:
        """The ways that layers take, as far as they have been called."""
        return self._attention.ways

    @property
    def why_plain(self) -> str:
        """Why the latest kind of layer that takes the plain way does not take a faster one."""
        return self._attention.why_plain

    @property
    def attends_together(self) -> bool:
        """Whether there are layers in which rows attend together to the blocks that they share."""
        return self._attention.attends_together

    def numerics(self) -> str:
        ways = {
            **self._product_ways,
            "attention": self.ways,
            "norms": {"torch" if self._norms.is_by_torch else "triton"},
            "heads": {"torch" if self._heads.is_by_torch else "triton"},
            "experts": {"torch" if self._mixtures is None else "triton"},
        }
        return gpu_numerics(Gpu.of(self._device), ways, self.rows_per_call)

    def product_numerics(self) -> str:
        return gpu_numerics(Gpu.of(self._device), self._product_ways, self.rows_per_call)

    @property
    def _product_ways(self) -> dict[str, set[str]]:
        return {"products": {"cublas" if self._products is None else "triton"}}

    def linear(
        self,
        x: torch.Tensor,
        weight: TorchWeight | TorchStack,
        bias: torch.Tensor | None = None,
        *,
        out_dtype: torch.dtype | None = None,
        adapters: RowAdapters | None = None,
    ) -> torch.Tensor:
        out = self._product(x, weight, bias, out_dtype)
        if out is None:
            return super().linear(x, weight, bias, out_dtype=out_dtype, adapters=adapters)
        return self._adapted(x, out, adapters)

    def gated_linear(
        self,
        x: torch.Tensor,
        weight: TorchWeight | TorchStack,
        *,
        activation: Activation,
        adapters: RowAdapters | None = None,
    ) -> torch.Tensor:
        if adapters is None:
            out = self._product(x, weight, activation=activation)
            return super().gated_linear(x, weight, activation=activation) if out is None else out
        sums = self._product(x, weight, out_dtype=torch.float32)
        if sums is None:
            return super().gated_linear(x, weight, activation=activation, adapters=adapters)
        return self._gate(self._adapted(x, sums, adapters), activation, x.dtype)

    def _product(
        self,
        x: torch.Tensor,
        weight: TorchWeight | TorchStack,
        bias: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        activation: Activation | None = None,
    ) -> torch.Tensor | None:
        """The product by Triton's kernel; None if torch is to compute it."""
        if self._products is None or not isinstance(weight, TorchWeight):
            return None
        try:
            return self._products(x, weight.matrix, bias, out_dtype, activation)
        except ProductsFail as failure:
            _log.warning("torch computes products, in calls of one number of rows: %s", failure)
            self._products, self.why_products_by_torch = None, str(failure)
            return None

    def pack_mixture(  # type: ignore[override]
        self,
        ups: Sequence[TorchWeight | TorchStack],
        downs: Sequence[TorchWeight | TorchStack],
        gate: Activation | ClampedGate | Ungated,
        biases: ExpertBiases | None = None,
        kind: ExpertKind = PLAIN_EXPERTS,
    ) -> StackedExperts | None:
        if self._mixtures is None or not isinstance(gate, str) or biases is not None or kind != PLAIN_EXPERTS:
            return None
        own_ups, own_downs = ([one for one in some if isinstance(one, TorchWeight)] for some in (ups, downs))
        if len(own_ups) != len(ups) or len(own_downs) != len(downs):
            return None
        return self._mixtures.pack(own_ups, own_downs, gate)

    def mix_experts(
        self,
        x: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
        mixture: StackedExperts,
        factor: float = 1.0,
        shared: SharedRows | None = None,
    ) -> torch.Tensor:
        assert self._mixtures is not None
        return self._mixtures.mix(x, chosen, weights, mixture, factor, shared)

    def sum_experts(
        self,
        outs: torch.Tensor,
        places: torch.Tensor,
        weights: torch.Tensor,
        factor: float = 1.0,
        shared: SharedRows | None = None,
    ) -> torch.Tensor:
        if self._mixtures is None:
            return super().sum_experts(outs, places, weights, factor, shared)
        return self._mixtures.sum_experts(outs, places, weights, factor, shared)

    def factor_product(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        out = self._product(x, TorchWeight(factor))
        return super().factor_product(x, factor) if out is None else out

    def _elementwise(self, x: torch.Tensor, compute: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        # A GPU computes each number of a tensor in the same way; a CPU does not.
        return compute(x) if x.is_cuda else super()._elementwise(x, compute)

    def route(self, logits: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
        return choose(logits, routing) if logits.is_cuda else super().route(logits, routing)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, *, plus_one: bool = False) -> torch.Tensor:
        norm = self._norms.kernel_for(x)
        if norm is None:
            return super().rms_norm(x, weight, eps, plus_one=plus_one)
        return norm(x, None, weight, eps, plus_one)[1]

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, plus_one: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        norm = self._norms.kernel_for(x)
        if norm is None:
            return super().add_rms_norm(x, residual, weight, eps, plus_one=plus_one)
        return norm(x, residual, weight, eps, plus_one)

    def prepare_heads(
        self, rows: HeadRows, cos: torch.Tensor, sin: torch.Tensor, cache: CacheView, slots: torch.Tensor
    ) -> bool:
        return self._heads.prepare(rows, cos, sin, cache, slots)

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, in_pairs: bool = False) -> None:
        if not self._heads.rotate(x, cos, sin, in_pairs):
            super().rotate(x, cos, sin, in_pairs=in_pairs)

    def store_kv(self, key: torch.Tensor, value: torch.Tensor | None, cache: CacheView, slots: torch.Tensor) -> None:
        if self._heads.store(key, value, cache, slots):
            return
        # Rows without a slot are written to the null block, which no query attends to. To leave them out, their number
        # would have to be read from the GPU.
        slots = slots.clamp(min=0)
        blocks, offsets = slots // cache.block_size, slots % cache.block_size
        if cache.scale_offset is not None:
            write_rows(cache, key, value, blocks, offsets)
            return
        keys, values = keys_and_values(cache)
        keys[blocks, :, offsets] = key
        if value is not None:
            values[blocks, :, offsets] = value

    def _float32_product(self, rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        # On a GPU torch returns the float32 sums of narrower operands, which need not be widened.
        if rows.device.type == "cuda":
            return torch.mm(rows, matrix.T, out_dtype=torch.float32)
        return super()._float32_product(rows, matrix)

    def paged_attention(self, call: AttentionCall) -> torch.Tensor:
        return self._attention.attend(call)
