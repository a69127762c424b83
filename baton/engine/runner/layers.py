"""Every product of a model goes through our own, so that no row's bits depend on how many rows there are.

Three kinds: linear layers (modules, replaced), experts (fused three-dimensional parameters, through transformers'
ExpertsInterface), and weights that some module multiplies by hand (a router's `F.linear`), which become tensors that
catch that call. `ProductWatch` then tells whether anything was missed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from baton.engine.runner.operations import Operations

EXPERTS_NAME = "baton_experts"

_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "linear", "matmul", "_grouped_mm"})


class PackedLinear(nn.Module):
    """A linear layer on a packed weight: [..., K] to [..., N]."""

    def __init__(
        self, operations: Operations, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight_dtype = dtype
        self._operations = operations
        self._packed = operations.pack(weight.detach())
        self._bias = None if bias is None else bias.detach().clone()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features)
        if not rows.is_contiguous():
            rows = rows.contiguous()
        if rows.shape[0] == 0:
            return x.new_empty(*x.shape[:-1], self.out_features)
        return self._operations.linear(rows, self._packed, self._bias).view(*x.shape[:-1], self.out_features)


class CaughtWeight(torch.Tensor):
    """A weight that some module multiplies by hand: `F.linear` with it runs our product, the rest sees a tensor."""

    product: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]

    @staticmethod
    def of(weight: torch.Tensor, operations: Operations) -> CaughtWeight:
        caught = weight.detach().clone().as_subclass(CaughtWeight)
        packed = operations.pack(weight.detach())

        def product(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            rows = x.reshape(-1, x.shape[-1]).contiguous()
            return operations.linear(rows, packed, bias).view(*x.shape[:-1], weight.shape[0])

        caught.product = product
        return caught

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func is functional.linear and isinstance(args[1], CaughtWeight):
                bias = args[2] if len(args) > 2 else kwargs.get("bias")
                return args[1].product(args[0], bias)
            return func(*args, **kwargs)


class PackedExperts:
    """One experts module's weights, one packed product per expert."""

    def __init__(self, operations: Operations, module: Any, row_quantum: int) -> None:
        self._operations = operations
        self._row_quantum = row_quantum
        self._up_name = "gate_up_proj" if module.has_gate else "up_proj"
        self._up = self._pack(module, self._up_name)
        self._down = self._pack(module, "down_proj")

    def _pack(self, module: Any, name: str) -> list[Any]:
        weights = getattr(module, name).detach()
        packed = [self._operations.pack(w.T.contiguous() if module.is_transposed else w) for w in weights]
        delattr(module, name)
        return packed

    def compute(
        self, module: Any, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden [T, K], index and weights [T, k]: the weighted sum of each row's experts [T, K].

        A row's experts are summed in the order of its own ranking, in float32.
        """
        num_rows, top_k = top_k_index.shape
        outs = hidden.new_zeros(num_rows * top_k, hidden.shape[-1])
        flat_index = top_k_index.reshape(-1)
        for expert in sorted(set(flat_index.tolist())):
            if expert >= len(self._up):
                continue
            places = (flat_index == expert).nonzero().squeeze(-1)
            rows = hidden[places // top_k]
            # Elementwise kernels treat the tail of a tensor differently: keep it out of the real rows.
            padded = functional.pad(rows, (0, 0, 0, -rows.shape[0] % self._row_quantum))
            outs[places] = self._expert(module, padded, expert)[: rows.shape[0]]
        weighted = outs.view(num_rows, top_k, -1).float() * top_k_weights.unsqueeze(-1).float()
        return weighted.sum(dim=1).to(hidden.dtype)

    def _expert(self, module: Any, rows: torch.Tensor, expert: int) -> torch.Tensor:
        up = self._operations.linear(rows, self._up[expert], self._bias(module, self._up_name, expert))
        inner = (module._apply_gate(up) if module.has_gate else module.act_fn(up)).contiguous()
        out = self._operations.linear(inner, self._down[expert], self._bias(module, "down_proj", expert))
        return module.post_expert_norm(out) if module.has_post_expert_norm else out

    @staticmethod
    def _bias(module: Any, name: str, expert: int) -> torch.Tensor | None:
        return getattr(module, f"{name}_bias")[expert].contiguous() if module.has_bias else None


def _experts_forward(
    module: Any, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    experts: PackedExperts = module.baton_experts
    return experts.compute(module, hidden, top_k_index, top_k_weights)


def register() -> None:
    """Make our experts known to transformers under EXPERTS_NAME."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, _experts_forward)


def replace_products(module: nn.Module, operations: Operations, row_quantum: int) -> None:
    """Replace every product in place; the original weights are freed as it goes (a tied embedding stays a table)."""
    from transformers.pytorch_utils import Conv1D

    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, PackedLinear(operations, child.weight, child.bias, child.weight.dtype))
            elif isinstance(child, Conv1D):
                weight = child.weight.detach().T.contiguous()
                setattr(parent, name, PackedLinear(operations, weight, child.bias, weight.dtype))
    for part in module.modules():
        if isinstance(part, nn.Embedding):
            continue
        # What transformers' decorator leaves on every experts class it lets others compute.
        if getattr(part, "_is_expert_parallel", None) is not None:
            object.__setattr__(part, "baton_experts", PackedExperts(operations, part, row_quantum))
            continue
        for name, parameter in list(part.named_parameters(recurse=False)):
            if parameter.dim() == 2:
                delattr(part, name)
                object.__setattr__(part, name, CaughtWeight.of(parameter, operations))
    # What is left (embeddings, norms) lies in the mapped file: a copy lets go of the file, and of its pages.
    for parameter in module.parameters():
        parameter.data = parameter.data.clone()


class ProductWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, collects torch's own products: `missed` names each. Outer products (inner width 1) sum nothing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.missed: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if "convolution" in name or "scaled_dot_product" in name:
            self.missed.add(name)
        elif name in _PRODUCTS:
            matrices = [arg for arg in args if isinstance(arg, torch.Tensor)][-2:]
            if matrices[0].shape[-1] != 1:
                self.missed.add(name)
        return func(*args, **(kwargs or {}))
