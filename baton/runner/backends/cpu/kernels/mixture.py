"""Kernels of mixtures of experts: the choice of each row's experts, and what they compute (csrc/mixture.c).

An expert's weights are read once for all rows that have chosen it. A row's experts are summed in float32, in the order
in which the row has chosen them, so its result depends on nothing but the row.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch

from baton.runner.backends.cpu.kernels.call_structs import (
    ActivateCall,
    ClampCall,
    LinearCall,
    MixtureCall,
    RouteCall,
    RoutingScores,
    SumCall,
)
from baton.runner.backends.cpu.kernels.errors import KernelArgumentError
from baton.runner.backends.cpu.kernels.float8 import PackedFloat8Weight
from baton.runner.backends.cpu.kernels.library import DTYPES, check_status, library
from baton.runner.backends.cpu.kernels.product import (
    ACTIVATIONS,
    NOT_GATED,
    Activation,
    PackedColumns,
    PackedWeight,
    Ungated,
)
from baton.runner.backends.cpu.kernels.quantized import PackedQuantizedWeight
from baton.runner.backends.cpu.kernels.rows import activate_structure
from baton.runner.backends.cpu.kernels.weights import Packed, PackedPart
from baton.runner.backends.routing import (
    PLAIN_EXPERTS,
    ClampedGate,
    ExpertBiases,
    ExpertKind,
    Routing,
    SharedRows,
)


class PackedMixture:
    """The weights of all experts of a mixture: of gate and up, and of down, each kind packed alike."""

    def __init__(
        self,
        ups: Sequence[Packed],
        downs: Sequence[Packed],
        gate: Activation | ClampedGate | Ungated,
        biases: ExpertBiases | None = None,
        kind: ExpertKind = PLAIN_EXPERTS,
    ) -> None:
        """`gate`: an activation for gated weights, or what is computed behind others.

        Raises KernelArgumentError for weights that are not packed alike, or have columns of padding.
        """
        clamp = gate if isinstance(gate, ClampedGate) else None
        self.num_experts = len(ups)
        self.k, self.inner = ups[0].k, ups[0].n // (1 if clamp is None else 2)
        self.clamped_width = 0 if clamp is None else ups[0].n
        """The columns of rows that a gate behind the product is computed of; 0: there is none."""
        first_up, first_down = _alike("ups", ups), _alike("downs", downs)
        if first_up.gated != isinstance(gate, str) or first_down.gated:
            raise KernelArgumentError("ups", "must be gated, or have something behind them, and downs neither")
        if (first_down.k, first_down.n) != (self.inner, self.k):
            raise KernelArgumentError("downs", f"must be [{self.k}, {self.inner}]")
        self.dtype = first_up.dtype if isinstance(first_up, PackedWeight) else None
        """The dtype that rows must have; None: rows may have any dtype of the kernels."""
        self._biases = biases
        self._kind = kind
        self._kept = (ups, downs)
        self._behind = _Behind.of(gate, self.inner)
        self._up, self._down = _expert_call(first_up, self._behind.activation), _expert_call(first_down, NOT_GATED)
        self._ups, self._downs = (_addresses(weights) for weights in (ups, downs))
        self.gathered_bytes, self.quantized_bytes = _row_bytes(first_up), _row_bytes(first_down)
        """The bytes of a quantised row of x, and of a quantised inner row; None: these rows are not quantised."""

    def structure(self, dtype: torch.dtype, factor: float, most: int) -> MixtureCall:
        """The kernel's arguments for rows of a dtype, without those of a step."""
        if self.dtype not in (None, dtype):
            raise KernelArgumentError("x", f"must be {self.dtype}, is {dtype}")
        call = MixtureCall(
            up=self._up,
            down=self._down,
            ups=ctypes.addressof(self._ups),
            downs=ctypes.addressof(self._downs),
            clamp=self._behind.clamp,
            activate=self._behind.activate,
        )
        if self._biases is not None:
            for name, bias, n in (("up", self._biases.up, call.up.n), ("down", self._biases.down, call.down.n)):
                _require_bias(name, bias, (self.num_experts, n), dtype)
            call.up_biases, call.down_biases = self._biases.up.data_ptr(), self._biases.down.data_ptr()
        for product in (call.up, call.down):
            product.out_dtype, product.out_stride = DTYPES[dtype], product.n
            product.x_stride = product.x_stride or product.k
        call.experts, call.x_stride = self.num_experts, self.k
        call.sum = SumCall(n=self.k, most=most, factor=factor, shared_stride=self.k, rest_stride=self.k)
        call.weighs_inputs, call.passes_rest = self._kind.weighs_inputs, self._kind.passes_rest
        return call


class PackedChoice:
    """The weights of all experts of a single product, packed alike, of which each row chooses some."""

    def __init__(
        self,
        weights: Sequence[Packed],
        gate: Activation | ClampedGate | Ungated | None = None,
        biases: torch.Tensor | None = None,
        kind: ExpertKind = PLAIN_EXPERTS,
        *,
        are_weighted: bool = False,
    ) -> None:
        """`gate`: as of a PackedMixture; None: nothing is computed behind the product. `biases`: of the weights.
        `are_weighted`: rows were multiplied with their weights before.

        Raises KernelArgumentError for weights that are gated without a gate, not packed alike, or have columns of
        padding.
        """
        first = _alike("weights", weights)
        if first.gated != isinstance(gate, str):
            raise KernelArgumentError("weights", "must be gated if there is an activation for gates, and only then")
        self.num_experts, self.k = len(weights), first.k
        self.clamped_width = first.n if isinstance(gate, ClampedGate) else 0
        """The columns of rows that a gate behind the product is computed of; 0: there is none."""
        self.n = first.n // (2 if self.clamped_width else 1)
        """How many columns each expert gives."""
        self.dtype = first.dtype if isinstance(first, PackedWeight) else None
        """The dtype that rows must have; None: rows may have any dtype of the kernels."""
        self.kind = kind
        self._biases, self._are_weighted = biases, are_weighted
        self._kept = weights
        self._behind = _Behind.of(gate, self.n)
        self._call, self._weights = _expert_call(first, self._behind.activation), _addresses(weights)
        self.gathered_bytes = _row_bytes(first)
        """The bytes of a quantised row of x; None: rows are not quantised."""

    def structure(
        self, dtype: torch.dtype, width: int, most: int, *, are_apart: bool, factor: float = 1.0
    ) -> MixtureCall:
        """The kernel's arguments for rows of a dtype and width, k or most * k, without those of a step.

        Raises KernelArgumentError for rows that don't fit.
        """
        if self.dtype not in (None, dtype) or width not in (self.k, most * self.k):
            raise KernelArgumentError("x", f"must have {self.k} or {most * self.k} columns in {self.dtype or dtype}")
        call = MixtureCall(up=self._call, ups=ctypes.addressof(self._weights))
        call.clamp, call.activate = self._behind.clamp, self._behind.activate
        if self._biases is not None:
            _require_bias("bias", self._biases, (self.num_experts, call.up.n), dtype)
            call.up_biases = self._biases.data_ptr()
        call.up.out_dtype, call.up.out_stride = DTYPES[dtype], call.up.n
        call.up.x_stride = call.up.x_stride or self.k
        call.experts, call.x_stride, call.x_apart = self.num_experts, width, 0 if width == self.k else self.k
        call.sum = SumCall(n=self.n, most=most, factor=factor, shared_stride=self.n, rest_stride=self.n)
        call.weighs_inputs, call.passes_rest = self.kind.weighs_inputs, self.kind.passes_rest
        call.are_weighted, call.are_apart = self._are_weighted, are_apart
        return call


class _Behind(NamedTuple):
    """What is computed of an expert's first products."""

    activation: int
    """The number by which the kernels know the activation of gated weights."""
    clamp: ClampCall
    activate: ActivateCall

    @classmethod
    def of(cls, gate: Activation | ClampedGate | Ungated | None, columns: int) -> _Behind:
        clamp, activate = ClampCall(), ActivateCall()
        if isinstance(gate, ClampedGate):
            clamp = ClampCall(columns=columns, limit=gate.limit, alpha=gate.alpha)
        if isinstance(gate, Ungated):
            activate = activate_structure(columns, columns, gate.activation)
        return cls(ACTIVATIONS[gate] if isinstance(gate, str) else NOT_GATED, clamp, activate)


def _require_bias(name: str, bias: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype) -> None:
    if bias.shape != shape or bias.dtype != dtype or not bias.is_contiguous():
        raise KernelArgumentError(f"{name} bias", f"must be {[*shape]} {dtype}, contiguous")


def _alike(name: str, weights: Sequence[Packed]) -> PackedPart:
    """The first of packed weights that differ in their numbers alone. Raises KernelArgumentError for others."""
    first = weights[0]
    if not isinstance(first, PackedWeight | PackedQuantizedWeight | PackedFloat8Weight):
        raise KernelArgumentError(name, "are stacked of weights that are packed differently")
    if isinstance(first, PackedColumns) and first.padded_k != first.k:
        raise KernelArgumentError(name, f"have {first.k} columns, and {first.padded_k} with their padding")
    for weight in weights:
        if type(weight) is not type(first) or (weight.n, weight.k) != (first.n, first.k) or _way(weight) != _way(first):
            raise KernelArgumentError(name, "are not packed alike")
    return first


def _way(weight: Packed) -> object:
    if isinstance(weight, PackedQuantizedWeight):
        return weight.format
    if isinstance(weight, PackedFloat8Weight):
        return weight.isa, weight.group
    return (weight.isa, weight.dtype) if isinstance(weight, PackedWeight) else None


def _expert_call(weight: PackedPart, activation: int) -> LinearCall:
    call = LinearCall(n=weight.n, k=weight.k, activation=activation)
    if isinstance(weight, PackedQuantizedWeight):
        call.format, call.x_stride = ctypes.addressof(weight.format), weight.row_bytes
    elif isinstance(weight, PackedFloat8Weight):
        call.scale_group = weight.group
    return call


def _row_bytes(weight: PackedPart) -> int | None:
    return weight.row_bytes if isinstance(weight, PackedQuantizedWeight) else None


def _addresses(weights: Sequence[Packed]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(weights))(*(weight.address for weight in weights))  # type: ignore[union-attr]


def route(logits: torch.Tensor, routing: Routing, *, threads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of logits [T, num_experts], the best first: int32 [T, most], and their weights, float32.

    Raises KernelArgumentError for tensors that don't fit.
    """
    if logits.ndim != 2 or logits.dtype not in DTYPES or not logits.is_cpu or not logits.is_contiguous():
        raise KernelArgumentError("logits", f"must be contiguous on the CPU, float32 or bfloat16, are {logits.dtype}")
    call = route_structure(logits.shape[1], routing)
    rows = logits.shape[0]
    chosen = torch.empty(rows, routing.most, dtype=torch.int32)
    weights = torch.empty(rows, routing.most, dtype=torch.float32)
    call.logits, call.chosen, call.weights, call.rows = logits.data_ptr(), chosen.data_ptr(), weights.data_ptr(), rows
    lib = library()
    check_status(lib.route(lib.isa, DTYPES[logits.dtype], ctypes.byref(call), threads))
    return chosen, weights


def route_structure(num_logits: int, routing: Routing) -> RouteCall:
    """The kernel's arguments, without those of a step. Raises KernelArgumentError for another number of experts."""
    if num_logits != routing.num_experts:
        raise KernelArgumentError("logits", f"are of {num_logits} experts, not of {routing.num_experts}")
    bias, factors = routing.choice_bias, routing.expert_factors
    return RouteCall(
        choice_bias=None if bias is None else bias.data_ptr(),
        expert_factors=None if factors is None else factors.data_ptr(),
        experts=routing.num_experts,
        most=routing.most,
        logits_stride=num_logits,
        groups=routing.groups,
        most_groups=routing.most_groups,
        scores=RoutingScores[routing.scores.upper()],
        groups_by_two=routing.groups_by_two,
        normalised=routing.normalised,
        eps=routing.eps,
        factor=routing.factor,
        near=routing.near,
        weights_dtype=DTYPES[routing.weights_dtype],
    )


def mix_experts(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    mixture: PackedMixture,
    factor: float = 1.0,
    shared: SharedRows | None = None,
    *,
    threads: int,
) -> torch.Tensor:
    """The sum of each row's experts, weighted, as `sum_experts` says: x [T, K] to [T, K].

    `chosen`: int32 [T, most]; one that is no expert's number computes nothing, or gives its row. Raises
    KernelArgumentError for tensors that don't fit.
    """
    if x.ndim != 2 or x.shape[1] != mixture.k or x.dtype not in DTYPES or not x.is_contiguous() or not x.is_cpu:
        raise KernelArgumentError("x", f"must be [T, {mixture.k}], contiguous, on the CPU, is {tuple(x.shape)}")
    if chosen.dtype != torch.int32 or chosen.shape != weights.shape or not chosen.is_contiguous():
        raise KernelArgumentError("chosen", f"must be int32 {tuple(weights.shape)}, contiguous")
    most = chosen.shape[1]
    call = mixture.structure(x.dtype, factor, most)
    rows, size = x.shape[0], x.dtype.itemsize
    places = rows * most
    outs, out = x.new_empty(places, mixture.k), x.new_empty(x.shape)
    gathered = torch.empty(places * (mixture.gathered_bytes or mixture.k * size), dtype=torch.uint8)
    inner = x.new_empty(places, mixture.inner)
    quantized = torch.empty(places * (mixture.quantized_bytes or 0), dtype=torch.uint8)
    clamped = x.new_empty(places, mixture.clamped_width)
    call.clamp.x = clamped.data_ptr()
    call.x, call.chosen = x.data_ptr(), chosen.data_ptr()
    call.gathered, call.inner, call.quantized = gathered.data_ptr(), inner.data_ptr(), quantized.data_ptr()
    _complete_sum(call.sum, outs, weights, shared, out)
    lib = library()
    check_status(lib.mixture(lib.isa, DTYPES[x.dtype], ctypes.byref(call), threads))
    return out


def multiply_chosen(
    x: torch.Tensor,
    chosen: torch.Tensor,
    choice: PackedChoice,
    weights: torch.Tensor | None = None,
    shared: SharedRows | None = None,
    factor: float = 1.0,
    rest: torch.Tensor | None = None,
    *,
    are_apart: bool | None = None,
    threads: int,
) -> torch.Tensor:
    """The products of rows with the weights that each has chosen (int32 [T, most]), side by side: [T, most * N].

    x [T, K] is multiplied with all of them, or of x [T, most * K] each piece with its own. With `weights` the products
    are summed, as `sum_experts` says: [T, N], unless `are_apart`. `rest` [T, N]: what chosen numbers give that are no
    expert's. Raises KernelArgumentError for tensors that don't fit.
    """
    if x.ndim != 2 or x.dtype not in DTYPES or not x.is_contiguous() or not x.is_cpu:
        raise KernelArgumentError("x", f"must be contiguous on the CPU, float32 or bfloat16, is {x.dtype}")
    if chosen.dtype != torch.int32 or chosen.ndim != 2 or len(chosen) != len(x) or not chosen.is_contiguous():
        raise KernelArgumentError("chosen", f"must be int32 [{len(x)}, most], contiguous")
    if weights is not None and weights.shape != chosen.shape:
        raise KernelArgumentError("weights", f"must be {tuple(chosen.shape)}")
    most = chosen.shape[1]
    are_apart = weights is None if are_apart is None else are_apart
    call = choice.structure(x.dtype, x.shape[1], most, are_apart=are_apart, factor=factor)
    places = len(x) * most
    gathered = torch.empty(places * (choice.gathered_bytes or choice.k * x.dtype.itemsize), dtype=torch.uint8)
    outs, clamped = x.new_empty(places, choice.n), x.new_empty(places, choice.clamped_width)
    out = x.new_empty(len(x), choice.n * (most if are_apart else 1))
    call.clamp.x = clamped.data_ptr()
    if rest is not None:
        if rest.shape != (len(x), choice.n) or rest.dtype != x.dtype or not rest.is_contiguous():
            raise KernelArgumentError("rest", f"must be [{len(x)}, {choice.n}] {x.dtype}, contiguous")
        call.rest = rest.data_ptr()
    call.x, call.chosen, call.gathered = x.data_ptr(), chosen.data_ptr(), gathered.data_ptr()
    _complete_sum(call.sum, outs, weights, shared, out)
    lib = library()
    check_status(lib.mixture(lib.isa, DTYPES[x.dtype], ctypes.byref(call), threads))
    return out


def clamped_gate(rows: torch.Tensor, gate: ClampedGate, *, threads: int) -> torch.Tensor:
    """The gate of rows [T, 2 N], contiguous: [T, N], computed in float32 and rounded once.

    Raises KernelArgumentError for tensors that don't fit.
    """
    if rows.ndim != 2 or rows.shape[1] % 2 or rows.dtype not in DTYPES or not rows.is_contiguous() or not rows.is_cpu:
        raise KernelArgumentError("rows", f"must be [T, 2 N], contiguous, on the CPU, are {tuple(rows.shape)}")
    out = rows.new_empty(rows.shape[0], rows.shape[1] // 2)
    call = ClampCall(
        x=rows.data_ptr(), out=out.data_ptr(), rows=len(rows), columns=out.shape[1], limit=gate.limit, alpha=gate.alpha
    )
    lib = library()
    check_status(lib.clamped_gate(lib.isa, DTYPES[rows.dtype], ctypes.byref(call), threads))
    return out


def sum_experts(
    outs: torch.Tensor,
    places: torch.Tensor,
    weights: torch.Tensor,
    factor: float = 1.0,
    shared: SharedRows | None = None,
    *,
    threads: int,
) -> torch.Tensor:
    """The sum of the rows `places` (int32 [T, most]) of outs [.., K], times weights (float32 [T, most]): [T, K].

    Summed in float32 in the order of each row's places, of which -1 stands for nothing, and rounded; times `factor`,
    and rounded; plus the shared rows. Raises KernelArgumentError for tensors that don't fit.
    """
    if outs.ndim != 2 or outs.dtype not in DTYPES or not outs.is_contiguous() or not outs.is_cpu:
        raise KernelArgumentError("outs", f"must be contiguous on the CPU, float32 or bfloat16, are {outs.dtype}")
    if places.dtype != torch.int32 or places.shape != weights.shape or not places.is_contiguous():
        raise KernelArgumentError("places", f"must be int32 {tuple(weights.shape)}, contiguous")
    if places.numel() and not -1 <= int(places.min()) <= int(places.max()) < len(outs):
        raise KernelArgumentError("places", f"must be -1 to {len(outs) - 1}")
    out = outs.new_empty(places.shape[0], outs.shape[1])
    call = SumCall(n=outs.shape[1], most=places.shape[1], factor=factor, places=places.data_ptr())
    _complete_sum(call, outs, weights, shared, out)
    lib = library()
    check_status(lib.sum_experts(lib.isa, DTYPES[outs.dtype], ctypes.byref(call), threads))
    return out


def _complete_sum(
    call: SumCall, outs: torch.Tensor, weights: torch.Tensor | None, shared: SharedRows | None, out: torch.Tensor
) -> None:
    call.outs, call.out, call.rows = outs.data_ptr(), out.data_ptr(), out.shape[0]
    if weights is None:
        return
    if weights.dtype != torch.float32 or not weights.is_contiguous() or weights.shape[0] != out.shape[0]:
        raise KernelArgumentError("weights", f"must be float32 [{out.shape[0]}, ..], contiguous")
    call.weights = weights.data_ptr()
    if shared is None:
        return
    count = out.shape[0]
    for name, rows, counts, width in (
        ("shared rows", shared.rows, (count, 1), out.shape[1]),
        ("gate", shared.gate, (count,), 1),
    ):
        if rows is None:
            continue
        fits = rows.ndim == 2 and rows.shape[0] in counts and rows.shape[1] == width
        if not fits or rows.dtype != out.dtype or not rows.is_contiguous():
            raise KernelArgumentError(name, f"must be [{count}, {width}] {out.dtype}, contiguous")
    call.shared, call.shared_stride = shared.rows.data_ptr(), 0 if len(shared.rows) == 1 else out.shape[1]
    call.gate = None if shared.gate is None else shared.gate.data_ptr()
