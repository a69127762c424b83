"""Chooses the implementation of the operations: the C kernels, torch without them, or CUDA on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from baton.runner.backends.attention_call import AttentionCall
from baton.runner.backends.cpu import kernels
from baton.runner.backends.cpu.kernels import (
    KernelArgumentError,
    Packed,
    PackedChoice,
    PackedHeads,
    PackedMixture,
    Program,
)
from baton.runner.backends.cpu.kernels.product import Activation, Ungated
from baton.runner.backends.cpu.kernels.rows import NO_LIMITS, GateActivation, GateFunction, Limits, RowActivation
from baton.runner.backends.cuda.cuda_operations import CudaOperations
from baton.runner.backends.cuda.graph_recording import GpuRecorder
from baton.runner.backends.cuda.kernels import triton_kernels
from baton.runner.backends.device import CPU
from baton.runner.backends.head_rows import HeadRows
from baton.runner.backends.key_selection import SelectionCall
from baton.runner.backends.low_rank import LowRank, RowAdapters
from baton.runner.backends.operations import Operations
from baton.runner.backends.paged_cache import CacheView
from baton.runner.backends.ranks.ranks import ONE_RANK, Ranks
from baton.runner.backends.routing import (
    PLAIN_EXPERTS,
    ClampedGate,
    ExpertBiases,
    ExpertKind,
    Routing,
    SharedRows,
)
from baton.runner.backends.state_calls import ConvolutionCall, RecurrenceCall
from baton.runner.backends.torch_operations import TorchOperations
from baton.runner.backends.weight_rows import Weight, read_weight


class CompiledOperations:
    """The C kernels, run on a fixed number of threads."""

    packs_quantized = True
    heads_are_independent = True

    def __init__(self, num_threads: int, numerics: str) -> None:
        self.num_threads = num_threads
        self.ranks: Ranks = ONE_RANK
        self._numerics = numerics

    def numerics(self) -> str:
        return self._numerics

    def program(self, dtype: torch.dtype) -> Program:
        return kernels.Program(dtype, self.num_threads)

    def pack(self, *weights: Weight) -> Packed:
        return kernels.pack(*map(read_weight, weights))

    def pack_own(self, *weights: Weight) -> Packed:
        return self.pack(*weights)

    def pack_gated(self, gate: Weight, up: Weight) -> Packed:
        return kernels.pack_gated(read_weight(gate), read_weight(up))

    def adapt(self, weight: Packed, terms: Sequence[LowRank], dtype: torch.dtype) -> Any:
        return kernels.adapt(weight, terms, dtype)

    def take_rows(self, weight: Packed, index: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        return kernels.take_rows(weight, index, dtype, threads=self.num_threads)

    def held_rows(
        self, weight: Packed, index: torch.Tensor, dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.arange(len(index)), self.take_rows(weight, index, dtype)

    def linear(
        self,
        x: torch.Tensor,
        weight: Packed,
        bias: torch.Tensor | None = None,
        *,
        out_dtype: torch.dtype | None = None,
        adapters: RowAdapters | None = None,
    ) -> torch.Tensor:
        return kernels.linear(x, weight, bias, out_dtype=out_dtype, threads=self.num_threads, adapters=adapters)

    def pack_heads(self, weights: Sequence[torch.Tensor]) -> PackedHeads:
        return kernels.pack_heads(weights)

    def linear_of_heads(self, x: torch.Tensor, weights: PackedHeads, out: torch.Tensor) -> None:
        kernels.linear_of_heads(x, weights, out, threads=self.num_threads)

    def gated_linear(
        self, x: torch.Tensor, weight: Packed, *, activation: Activation, adapters: RowAdapters | None = None
    ) -> torch.Tensor:
        return kernels.gated_linear(x, weight, activation=activation, threads=self.num_threads, adapters=adapters)

    def pack_mixture(
        self,
        ups: Sequence[Packed],
        downs: Sequence[Packed],
        gate: Activation | ClampedGate | Ungated,
        biases: ExpertBiases | None = None,
        kind: ExpertKind = PLAIN_EXPERTS,
    ) -> PackedMixture | None:
        try:
            return PackedMixture(ups, downs, gate, biases, kind)
        except KernelArgumentError:
            return None

    def pack_choice(self, weights: Sequence[Packed]) -> PackedChoice | None:
        try:
            return PackedChoice(weights)
        except KernelArgumentError:
            return None

    def route(self, logits: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
        return kernels.route(logits, routing, threads=self.num_threads)

    def mix_experts(
        self,
        x: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
        mixture: PackedMixture,
        factor: float = 1.0,
        shared: SharedRows | None = None,
    ) -> torch.Tensor:
        return kernels.mix_experts(x, chosen, weights, mixture, factor, shared, threads=self.num_threads)

    def multiply_chosen(
        self,
        x: torch.Tensor,
        chosen: torch.Tensor,
        choice: PackedChoice,
        weights: torch.Tensor | None = None,
        shared: SharedRows | None = None,
    ) -> torch.Tensor:
        return kernels.multiply_chosen(x, chosen, choice, weights, shared, threads=self.num_threads)

    def clamped_gate(self, rows: torch.Tensor, gate: ClampedGate) -> torch.Tensor:
        return kernels.clamped_gate(rows, gate, threads=self.num_threads)

    def sum_experts(
        self,
        outs: torch.Tensor,
        places: torch.Tensor,
        weights: torch.Tensor,
        factor: float = 1.0,
        shared: SharedRows | None = None,
    ) -> torch.Tensor:
        return kernels.sum_experts(outs, places, weights, factor, shared, threads=self.num_threads)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, *, plus_one: bool = False) -> torch.Tensor:
        return kernels.rms_norm(x, weight, eps, plus_one=plus_one, threads=self.num_threads)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, plus_one: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return kernels.add_rms_norm(x, residual, weight, eps, plus_one=plus_one, threads=self.num_threads)

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
        return kernels.layer_norm(x, weight, bias, eps, threads=self.num_threads)

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
        return kernels.gated_rms_norm(x, gate, weight, eps, activation, gate_first=gate_first, threads=self.num_threads)

    def gate(
        self,
        x: torch.Tensor,
        function: GateFunction,
        bias: torch.Tensor | None,
        factor: torch.Tensor | None,
        limits: Limits = NO_LIMITS,
        scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return kernels.gate(x, function, bias, factor, limits, scale, threads=self.num_threads)

    def multiply(self, x: torch.Tensor, by: torch.Tensor, activation: GateFunction | None) -> torch.Tensor:
        return kernels.multiply(x, by, activation, threads=self.num_threads)

    def activate(self, x: torch.Tensor, activation: RowActivation) -> torch.Tensor:
        return kernels.activate(x, activation, threads=self.num_threads)

    def mix_streams(self, x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        return kernels.mix_streams(x, factors, threads=self.num_threads)

    def correct_streams(
        self, x: torch.Tensor, result: torch.Tensor, factors: torch.Tensor, active: int
    ) -> torch.Tensor:
        return kernels.correct_streams(x, result, factors, active, threads=self.num_threads)

    def mean_of_streams(self, x: torch.Tensor, num_streams: int) -> torch.Tensor:
        return kernels.mean_of_streams(x, num_streams, threads=self.num_threads)

    def row_means(self, x: torch.Tensor) -> torch.Tensor:
        return kernels.row_means(x, threads=self.num_threads)

    def resize(self, x: torch.Tensor, like: torch.Tensor, least: float) -> torch.Tensor:
        return kernels.resize(x, like, least, threads=self.num_threads)

    def sparse_gate(self, x: torch.Tensor, deviations: float, activation: Activation) -> torch.Tensor:
        return kernels.sparse_gate(x, deviations, activation, threads=self.num_threads)

    def prepare_heads(
        self, rows: HeadRows, cos: torch.Tensor, sin: torch.Tensor, cache: CacheView, slots: torch.Tensor
    ) -> bool:
        return False

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, in_pairs: bool = False) -> None:
        kernels.rotate(x, cos, sin, in_pairs=in_pairs, threads=self.num_threads)

    def store_kv(self, key: torch.Tensor, value: torch.Tensor | None, cache: CacheView, slots: torch.Tensor) -> None:
        kernels.store_kv(key, value, cache, slots)

    def paged_attention(self, call: AttentionCall) -> torch.Tensor:
        return kernels.paged_attention(call, threads=self.num_threads)

    def select_keys(self, call: SelectionCall) -> torch.Tensor:
        return kernels.select_keys(call, threads=self.num_threads)

    def convolve(self, call: ConvolutionCall) -> torch.Tensor:
        return kernels.convolve(call, threads=self.num_threads)

    def recur(self, call: RecurrenceCall) -> torch.Tensor:
        return kernels.recur(call, threads=self.num_threads)


def choose_operations(num_threads: int, device: torch.device = CPU) -> Operations:
    """On a CPU the C kernels if they can run, otherwise torch's products; on a GPU the CUDA operations.

    Their numerics have different names.
    """
    if device.type != "cpu":
        return CudaOperations(device, triton_kernels(), GpuRecorder())
    info = kernels.available()
    if not info:
        return TorchOperations(num_threads)
    return CompiledOperations(num_threads, f"kernels-{info.numerics}")
