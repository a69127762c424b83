"""The interface of the operations that a step consists of; a row's result must not depend on the other rows.

One model uses one implementation: the C kernels (kernel_choice.py), torch's products in calls of a fixed number of rows
(torch_operations.py), or the same on a GPU (cuda_operations.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from baton.runner.backends.attention_call import AttentionCall
from baton.runner.backends.cpu.kernels.product import Activation, Ungated
from baton.runner.backends.cpu.kernels.programs.program import Program
from baton.runner.backends.cpu.kernels.rows import NO_LIMITS, GateActivation, GateFunction, Limits, RowActivation
from baton.runner.backends.head_rows import HeadRows
from baton.runner.backends.key_selection import SelectionCall
from baton.runner.backends.low_rank import LowRank, RowAdapters
from baton.runner.backends.paged_cache import CacheView
from baton.runner.backends.ranks.ranks import Ranks
from baton.runner.backends.routing import (
    PLAIN_EXPERTS,
    ClampedGate,
    ExpertBiases,
    ExpertKind,
    Routing,
    SharedRows,
)
from baton.runner.backends.state_calls import ConvolutionCall, RecurrenceCall
from baton.runner.backends.weight_rows import Weight


class Operations(Protocol):
    """Row-invariant products, norms and paged attention. A module can implement it. T and M are numbers of rows."""

    @property
    def packs_quantized(self) -> bool:
        """Whether `pack` and `pack_gated` take quantised weights; without it they are dequantised before."""
        ...

    @property
    def heads_are_independent(self) -> bool:
        """Whether a head's attention has the same bits however many heads of the same key are in a call."""
        ...

    @property
    def ranks(self) -> Ranks:
        """The ranks that compute the model together; ONE_RANK where one process computes it alone."""
        ...

    def numerics(self) -> str:
        """A name for everything that decides the bits: equal names and equal models give equal bits."""
        ...

    def program(self, dtype: torch.dtype) -> Program | None:
        """An empty program of these operations, or None where operations can only be called one by one."""
        ...

    def pack(self, *weights: Weight) -> Any:
        """Prepare weights [N_i, K], stacked over their outputs, for `linear`; the arguments are not kept.

        Quantised weights stay as small as they are, and may differ in format. Raises a BatonError for one whose groups
        are not a multiple of 4, or for float8 of 32.
        """
        ...

    def pack_own(self, *weights: Weight) -> Any:
        """Prepare what this rank has of stacked weights, for a `linear` whose result is not gathered from all ranks."""
        ...

    def pack_gated(self, gate: Weight, up: Weight) -> Any:
        """Prepare two weights [N, K] of one kind for `gated_linear`; the arguments are not kept."""
        ...

    def adapt(self, weight: Any, terms: Sequence[LowRank], dtype: torch.dtype) -> Any:
        """Prepare what an adapter adds to products of rows in `dtype` with a packed weight, for `RowAdapters`."""
        ...

    def take_rows(self, weight: Any, index: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The rows `index` [T] of a packed weight, with the bits that `pack` was given: [T, K].

        Those of a quantised weight are dequantised to `dtype`, which other weights don't need.
        """
        ...

    def held_rows(
        self, weight: Any, index: torch.Tensor, dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Those of the rows `index` [T] that this process has itself: their places in `index` [n], and rows [n, K].

        No other rank is asked: call it from any thread, also while a step is computed.
        """
        ...

    def linear(
        self,
        x: torch.Tensor,
        weight: Any,
        bias: torch.Tensor | None = None,
        *,
        out_dtype: torch.dtype | None = None,
        adapters: RowAdapters | None = None,
    ) -> torch.Tensor:
        """The product of x [M, K] and the packed weight [N, K] transposed, plus bias [N]: [M, N].

        `adapters`: of each row; what a row's adapter adds depends on this row alone. None: no row has any.

        The result is in `out_dtype`: x's dtype (None), or float32, whose sums are not rounded to a narrower x's dtype.
        For a weight in integers each row of x is rounded to 8 bits, in blocks of at most 32 elements.
        """
        ...

    def pack_heads(self, weights: Sequence[torch.Tensor]) -> Any:
        """Prepare weights of heads [N, K], all of one shape, for `linear_of_heads`; the arguments are not kept.

        As a sequence it has what `pack_own` would give for each.
        """
        ...

    def linear_of_heads(self, x: torch.Tensor, weights: Any, out: torch.Tensor) -> None:
        """Write the product of each head's rows and its weight transposed to `out` [T, H, N], in x's dtype.

        x [T, H, K] and `out` may have gaps between the rows of a token's heads. The bits are those of `linear`.
        """
        ...

    def gated_linear(
        self, x: torch.Tensor, weight: Any, *, activation: Activation, adapters: RowAdapters | None = None
    ) -> torch.Tensor:
        """The gated product activation(x gateᵀ) * (x upᵀ): x [M, K] to [M, N] in x's dtype.

        Adapters change gate and up before the activation.
        """
        ...

    def pack_mixture(
        self,
        ups: Sequence[Any],
        downs: Sequence[Any],
        gate: Activation | ClampedGate | Ungated,
        biases: ExpertBiases | None = None,
        kind: ExpertKind = PLAIN_EXPERTS,
    ) -> Any:
        """Prepare the packed weights of all experts for `mix_experts`; they are kept, and so are biases.

        `gate`: of gated weights an activation; otherwise what is computed behind them. None for weights that can only
        be multiplied one by one.
        """
        ...

    def pack_choice(self, weights: Sequence[Any]) -> Any:
        """Prepare the packed weights [N, K] of experts with a single product for `multiply_chosen`; they are kept.

        None for weights that can only be multiplied one by one.
        """
        ...

    def clamped_gate(self, rows: torch.Tensor, gate: ClampedGate) -> torch.Tensor:
        """The gate of rows [T, 2 N], contiguous: [T, N], computed in float32 and rounded once."""
        ...

    def route(self, logits: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts of logits [T, num_experts], the best first: int32 [T, most], and their weights, float32."""
        ...

    def mix_experts(
        self,
        x: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
        mixture: Any,
        factor: float = 1.0,
        shared: SharedRows | None = None,
    ) -> torch.Tensor:
        """The sum of each row's experts: x [T, K], chosen and weights [T, most] as `route` gives them, to [T, K].

        The bits are those of `gated_linear` and `linear` with each expert, and of `sum_experts`. An expert beyond those
        of the mixture computes nothing, or what its kind says.
        """
        ...

    def multiply_chosen(
        self,
        x: torch.Tensor,
        chosen: torch.Tensor,
        choice: Any,
        weights: torch.Tensor | None = None,
        shared: SharedRows | None = None,
    ) -> torch.Tensor:
        """The products of rows and the weights that each has chosen (int32 [T, most]), side by side: [T, most * N].

        x [T, K] is multiplied with all of them, or of x [T, most * K] each piece with its own. With `weights` they are
        summed instead: [T, N]. The bits are those of `linear` with each weight, and of `sum_experts`.
        """
        ...

    def sum_experts(
        self,
        outs: torch.Tensor,
        places: torch.Tensor,
        weights: torch.Tensor,
        factor: float = 1.0,
        shared: SharedRows | None = None,
    ) -> torch.Tensor:
        """The sum of the rows `places` (int32 [T, most]; -1: none) of outs, times weights (float32), to [T, K].

        Summed in float32 in the order of each row's places, and rounded; times `factor`, and rounded; plus the shared
        rows, which are multiplied with their gate's sigmoid and rounded before.
        """
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, *, plus_one: bool = False) -> torch.Tensor:
        """Divide x [..., N] by its root mean square, in float32, and multiply by the weight [N], or by 1 + weight."""
        ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, plus_one: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum x + residual in their dtype, and the `rms_norm` of the sum; both [..., N]."""
        ...

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
        """The norm of x [..., N] around its mean, times the weight [N], plus bias [N], in float32 and rounded once.

        The weight may be [H, N], for x [..., H, N].
        """
        ...

    def gated_rms_norm(
        self,
        x: torch.Tensor,
        gate: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        activation: GateActivation,
        *,
        gate_first: bool = False,
    ) -> torch.Tensor:
        """The `rms_norm` of x [T, H, N], times activation(gate), whose shape is x's; the weight is [N] or [H, N].

        `gate_first`: the norm of x * activation(gate) instead. Everything is computed in float32 and rounded once.
        """
        ...

    def gate(
        self,
        x: torch.Tensor,
        function: GateFunction,
        bias: torch.Tensor | None,
        factor: torch.Tensor | None,
        limits: Limits = NO_LIMITS,
        scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The gates factor * function((x + bias) * scale) of x [T, N], in float32; the others are float32 [N] or None.

        `limits`: between which the function's values are kept. The logarithms of decay in Gated DeltaNet are such
        gates, with softplus and the factor -exp(A_log).
        """
        ...

    def multiply(self, x: torch.Tensor, by: torch.Tensor, activation: GateFunction | None) -> torch.Tensor:
        """x * activation(by), or without one x * by, of x and by [T, N] in x's dtype: [T, N].

        by may be [T, H], with one number for each N / H columns of x. Everything is computed in float32 and rounded
        once.
        """
        ...

    def activate(self, x: torch.Tensor, activation: RowActivation) -> torch.Tensor:
        """activation(x) of x [T, N], in float32 and rounded once: [T, N]."""
        ...

    def mix_streams(self, x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """Each stream of x [T, S * N] plus a sum of all of them, by factors [T, S * S], S of each stream: [T, S * N].

        The sum is added up in float32, one stream after the other, and rounded, and then the streams are.
        """
        ...

    def correct_streams(
        self, x: torch.Tensor, result: torch.Tensor, factors: torch.Tensor, active: int
    ) -> torch.Tensor:
        """Each stream of x [T, S * N] plus (result - the active one) * (factor + 1), of result [T, N] and factors
        [T, S], each step rounded: [T, S * N]."""
        ...

    def mean_of_streams(self, x: torch.Tensor, num_streams: int) -> torch.Tensor:
        """The mean of the streams of x [T, S * N], added up in float32 one after the other: [T, N]."""
        ...

    def row_means(self, x: torch.Tensor) -> torch.Tensor:
        """The mean of each row of x [T, N], added up in float32 and rounded once: [T, 1]."""
        ...

    def resize(self, x: torch.Tensor, like: torch.Tensor, least: float) -> torch.Tensor:
        """x * size(like) / size(x) of x and like [T, N], each step rounded. A row's size is the root of its mean
        square, which for x is at least `least`; the means are those of `row_means`."""
        ...

    def sparse_gate(self, x: torch.Tensor, deviations: float, activation: Activation) -> torch.Tensor:
        """activation(max(0, g - cutoff)) * u of x [T, 2 N], each row g and then u: [T, N].

        The cutoff is the mean of a row's g plus `deviations` times their standard deviation. Everything is computed in
        float32 and rounded once.
        """
        ...

    def prepare_heads(
        self, rows: HeadRows, cos: torch.Tensor, sin: torch.Tensor, cache: CacheView, slots: torch.Tensor
    ) -> bool:
        """Norm and rotate queries in place, norm, rotate and store keys, and store values, all in one call.

        cos, sin [T, R]: as of `rotate`; with R = 0 nothing is rotated. slots [T]: as of `store_kv`. False, and nothing
        is done, where there is no such call: one operation after the other has to do it.
        """
        ...

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, in_pairs: bool = False) -> None:
        """Rotate the first R columns of x [T, H, D] in place by cos and sin [T, R], whose two halves are equal.

        Cosines and sines are in x's dtype or float32. `in_pairs`: each two neighbours belong together, and not the two
        halves. Everything is computed in float32 and rounded once.
        """
        ...

    def store_kv(self, key: torch.Tensor, value: torch.Tensor | None, cache: CacheView, slots: torch.Tensor) -> None:
        """Write key [T, KH, KD] and value [T, KH, VD] into the cache at slots [T].

        A slot is block * block_size + offset; rows with a negative slot are skipped. `value`: None for a cache whose
        values are in its keys.
        """
        ...

    def paged_attention(self, call: AttentionCall) -> torch.Tensor:
        """Attention of the call's query [T, H, KD] over the cache: [T, H, VD].

        Raises KernelArgumentError for biases of distances that don't fit.
        """
        ...

    def select_keys(self, call: SelectionCall) -> torch.Tensor:
        """The keys that each row attends to: bits, int64 [T, W] (key_selection.py); zeros for rows of no sequence."""
        ...

    def convolve(self, call: ConvolutionCall) -> torch.Tensor:
        """The convolution of the call's rows [T, W]: [T, W] in their dtype; writes the states behind them.

        Raises KernelArgumentError, and writes nothing, for arguments that don't fit, and for block tables that name no
        block with the state from which a sequence goes on.
        """
        ...

    def recur(self, call: RecurrenceCall) -> torch.Tensor:
        """The outputs [T, H, DV] of the call's recurrence in the rows' dtype; writes the states behind the rows.

        Raises KernelArgumentError as `convolve`; DK and DV are from 1 to 512.
        """
        ...
