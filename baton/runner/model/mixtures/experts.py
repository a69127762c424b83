"""The experts of a mixture, packed, which compute the rows that were routed to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from baton.runner.adapters.adaptable import AdaptableExperts, hold_parameters, routed
from baton.runner.backends.cpu.kernels.product import Ungated
from baton.runner.backends.operations import Operations
from baton.runner.backends.routing import PLAIN_EXPERTS, ClampedGate, ExpertBiases, ExpertKind, SharedRows
from baton.runner.backends.weight_rows import Weight
from baton.runner.model.recognition import gated_activation, known_activation
from baton.runner.model.stored.layers import halves_of, read_packed, take_experts

EXPERTS_NAME = "baton_experts"


class PackedExperts:
    """The weights of one experts module, packed for each expert; `release` is called before the module loses them."""

    def __init__(
        self, operations: Operations, module: Any, row_quantum: int, release: Callable[[nn.Module], None]
    ) -> None:
        self._operations = operations
        self._row_quantum = row_quantum
        self._up_name = "gate_up_proj" if module.has_gate else "up_proj"
        # Older releases of transformers don't set it: no experts of theirs have a norm.
        self._has_norm: bool = getattr(module, "has_post_expert_norm", False)
        self._kind: ExpertKind = getattr(module, "baton_kind", PLAIN_EXPERTS)
        self._held = take_experts(module)
        self._activation, self._clamp = None, _clamped_gate_of(module)
        if module.has_gate and not module.has_bias:
            self._activation = gated_activation(module._apply_gate)
        self._ungated = None if module.has_gate else _ungated_of(module)
        others = [name for name, _ in module.named_parameters(recurse=False)]
        self._up = self._pack(module, self._up_name, release, gated=self._activation is not None)
        self._down = self._pack(module, "down_proj", release)
        self.mixture: Any = None
        """All experts for one call of `mix_experts`; None: they are multiplied one by one."""
        gate = self._activation or self._clamp or self._ungated
        if gate is not None and not self._has_norm:
            biases = None
            if module.has_bias:
                of_products = (getattr(module, f"{name}_bias").detach() for name in (self._up_name, "down_proj"))
                biases = ExpertBiases(*(bias.clone() for bias in of_products))
            self.mixture = operations.pack_mixture(self._up.packed, self._down.packed, gate, biases, self._kind)
        # In the order in which every module of transformers has them.
        products = {self._up_name: self._up, "down_proj": self._down}
        hold_parameters(module, products | {name: None for name in others if name not in products})

    def _pack(
        self, module: Any, name: str, release: Callable[[nn.Module], None], gated: bool = False
    ) -> AdaptableExperts:
        num_outputs, num_inputs = self._shape(module, name)
        if name in self._held:
            packed, left = [], [*reversed(self._held.pop(name))]
            while left:  # what is kept of an expert is freed with it
                packed.append(self._pack_held([read_packed(stored) for stored in left.pop()], gated))
        else:
            packed = []
            for weight in getattr(module, name).detach():
                rows = weight.T.contiguous() if module.is_transposed else weight
                packed.append(self._operations.pack_gated(*rows.chunk(2)) if gated else self._operations.pack(rows))
            # Before they are deleted: `release` finds the pages to unmap through the module's parameters.
            release(module)
            delattr(module, name)
        num_stacked: int = getattr(module, "num_stacked", {}).get(name, len(packed))
        return AdaptableExperts(self._operations, packed, num_outputs, num_inputs, num_stacked)

    def _shape(self, module: Any, name: str) -> tuple[int, int]:
        """The numbers of outputs and of inputs of one expert."""
        if name in self._held:
            weights = self._held[name][0]
            return sum(weight.shape[0] for weight in weights), weights[0].shape[1]
        _, outputs, inputs = getattr(module, name).shape
        return (inputs, outputs) if module.is_transposed else (outputs, inputs)

    def _pack_held(self, weights: Sequence[Weight], gated: bool) -> Any:
        if gated:
            gate, up = weights if len(weights) == 2 else halves_of(weights[0])
            return self._operations.pack_gated(gate, up)
        return self._operations.pack(*weights)

    @property
    def is_adapted(self) -> bool:
        """Whether an adapter of the step's rows changes an expert."""
        return self._up.is_adapted or self._down.is_adapted

    def compute(
        self,
        module: Any,
        hidden: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
        factor: float = 1.0,
        shared: SharedRows | None = None,
    ) -> torch.Tensor:
        """The weighted sum of each row's experts: hidden [T, K], chosen and weights [T, k] to [T, K].

        Summed as `Operations.sum_experts` says, in the order of the row's own ranking.
        """
        num_rows, top_k = chosen.shape
        of_up, of_down = self._up.slots(num_rows), self._down.slots(num_rows)
        slots = of_down if of_up is None else of_up
        weights = weights.float().contiguous()
        if self.mixture is not None and slots is None:
            rows, chosen = hidden.contiguous(), chosen.int().contiguous()
            return self._operations.mix_experts(rows, chosen, weights, self.mixture, factor, shared)
        outs = hidden.new_zeros(num_rows * top_k, hidden.shape[-1])
        flat_index = chosen.reshape(-1)
        for expert in sorted(set(flat_index.tolist())):
            if expert >= self._up.num_experts:
                continue
            places = (flat_index == expert).nonzero().squeeze(-1)
            index = places // top_k
            rows = hidden[index]
            if self._kind.weighs_inputs:
                rows = rows * weights.flatten()[places, None].to(rows.dtype)
            # torch's elementwise kernels round differently in the tail of a tensor, so only padding may be in the tail.
            padded = functional.pad(rows, (0, 0, 0, -rows.shape[0] % self._row_quantum))
            own_slots = routed(slots, index, padded.shape[0])
            outs[places] = self._expert(module, padded, expert, own_slots)[: rows.shape[0]]
        places = torch.arange(num_rows * top_k, dtype=torch.int32, device=hidden.device)
        is_expert = flat_index < self._up.num_experts
        if self._kind.passes_rest:
            rest = (~is_expert).nonzero().squeeze(-1)
            outs[rest] = hidden[rest // top_k]
        else:
            places = places.where(is_expert, -1)
        places = places.view(num_rows, top_k)
        if self._kind.weighs_inputs:
            weights = torch.ones_like(weights).where(is_expert.view(places.shape), weights)
        return self._operations.sum_experts(outs, places, weights, factor, shared)

    def _expert(self, module: Any, rows: torch.Tensor, expert: int, slots: torch.Tensor | None) -> torch.Tensor:
        if self._activation is not None:
            inner = self._up.gated_linear(rows, expert, slots, self._activation)
        else:
            up = self._up.linear(rows, expert, slots, self._bias(module, self._up_name, expert))
            inner = self._behind(module, up)
        out = self._down.linear(inner, expert, slots, self._bias(module, "down_proj", expert))
        return module.post_expert_norm(out) if self._has_norm else out

    def _behind(self, module: Any, up: torch.Tensor) -> torch.Tensor:
        if self._clamp is not None:
            return self._operations.clamped_gate(up, self._clamp)
        if self._ungated is not None:
            return self._operations.activate(up, self._ungated.activation)
        active: torch.Tensor = module._apply_gate(up) if module.has_gate else module.act_fn(up)
        return active.contiguous()

    @staticmethod
    def _bias(module: Any, name: str, expert: int) -> torch.Tensor | None:
        return getattr(module, f"{name}_bias")[expert].contiguous() if module.has_bias else None


def _ungated_of(module: Any) -> Ungated | None:
    """What a module without gates computes of its first products, if it is known."""
    activation = known_activation(module.act_fn)
    return None if activation is None else Ungated(activation)


def _clamped_gate_of(module: Any) -> ClampedGate | None:
    """The gate that a module computes of its products, if it is such a one."""
    limit, alpha = getattr(module, "limit", None), getattr(module, "alpha", None)
    if not module.has_gate or not isinstance(limit, float) or not isinstance(alpha, float):
        return None
    rows = torch.randn(16, 64, dtype=torch.float32, generator=torch.Generator().manual_seed(0)) * limit
    gate = ClampedGate(limit, alpha)
    return gate if torch.allclose(module._apply_gate(rows), gate.of(rows), atol=1e-5) else None


def _experts_forward(
    module: Any, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    experts: PackedExperts = module.baton_experts
    return experts.compute(module, hidden, top_k_index, top_k_weights)


def register() -> None:
    """Register Baton's experts with transformers under EXPERTS_NAME."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, _experts_forward)
