"""Replaces every product of a model by a row-invariant one: a row's bits don't depend on how many rows there are.

There are three kinds of products: linear layers (modules, which are replaced), experts (fused three-dimensional
parameters, which are computed through transformers' ExpertsInterface: mixtures/experts.py, or rows choose some of them:
mixtures/chosen.py), and weights that a module multiplies itself with `F.linear` (a mixture's router), which become
tensors that intercept the call. `ProductWatch` finds products that were missed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from baton.runner.adapters.adaptable import AdaptableProduct, HasProducts, hold_parameters
from baton.runner.backends.cpu.kernels.buffers import Rows
from baton.runner.backends.cpu.kernels.programs.program import Program
from baton.runner.backends.device import CPU
from baton.runner.backends.operations import Operations
from baton.runner.backends.weight_rows import Weight
from baton.runner.model.comparison import children_of
from baton.runner.model.mixtures.chosen import ChosenProduct
from baton.runner.model.mixtures.experts import PackedExperts
from baton.runner.model.stored.absent_weight import AbsentWeight, of_products
from baton.runner.model.stored.layers import StoredEmbedding, StoredLinear, look_rows_up_in, read_packed, take_weight
from baton.runner.model.stored.plan import is_experts, is_linear

_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "linear", "matmul", "_grouped_mm"})


_CASTS = (torch.Tensor.to, torch.Tensor.type, torch.Tensor.float)


class PackedLinear(nn.Module, HasProducts):
    """A linear layer on a packed weight: [..., K] to [..., N], in `out_dtype`: x's dtype (None), or float32."""

    def __init__(
        self,
        operations: Operations,
        weight: Weight,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._weight_dtype = dtype
        self._device = weight.device if isinstance(weight, torch.Tensor) else CPU
        self._out_dtype = out_dtype
        self.operations = operations
        self._packed = operations.pack(weight)
        self._packed_casts: dict[torch.dtype, Any] = {dtype: self._packed}
        """The packed weight in every dtype that the model's modules have multiplied it in."""
        self._absent: dict[torch.dtype, AbsentWeight] = {}
        """What stands for the weight, in every dtype that modules have asked for."""
        self._product = AdaptableProduct(operations, self._packed, self.in_features, [("", self.out_features)])
        self.bias = None if bias is None else bias.detach().clone()

    @property
    def weight(self) -> torch.Tensor:
        """What modules may ask of the weight [N, K], and multiply with `F.linear` themselves; it has no numbers."""
        return self._weight_in(self._weight_dtype)

    def _weight_in(self, dtype: torch.dtype) -> torch.Tensor:
        if dtype not in self._absent:
            self._absent[dtype] = self._absent_in(dtype)
        return self._absent[dtype]

    def _absent_in(self, dtype: torch.dtype) -> AbsentWeight:
        def product(x: torch.Tensor, _weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            rows = x.reshape(-1, self.in_features).contiguous()
            out = self._product.linear(rows, bias, packed=self._packed_in(dtype))
            return out.view(*x.shape[:-1], self.out_features)

        def cast(func: Callable[..., Any], _weight: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
            return self._weight_in(func(torch.empty((), dtype=dtype), *arguments, **named).dtype)

        answers = of_products(product) | {func: partial(cast, func) for func in _CASTS}
        like = torch.empty((), dtype=dtype, device=self._device)
        return AbsentWeight.of(like.expand(self.out_features, self.in_features), answers)

    def product_in(self, dtype: torch.dtype) -> tuple[AdaptableProduct, Any]:
        """The product, and its packed weight in a dtype."""
        return self._product, self._packed_in(dtype)

    def _packed_in(self, dtype: torch.dtype) -> Any:
        if dtype not in self._packed_casts:
            weight = self.take_rows(torch.arange(self.out_features, device=self._device))
            self._packed_casts[dtype] = self.operations.pack(weight.to(dtype))
        return self._packed_casts[dtype]

    @property
    def products(self) -> Sequence[AdaptableProduct]:
        return (self._product,)

    def keep(self, index: torch.Tensor) -> None:
        """Say that of the step's rows only `index` are left, for which `rows` is called next."""
        self._product.keep(index)

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, K], contiguous: [T, N]."""
        if x.shape[0] == 0:
            return x.new_empty(0, self.out_features, dtype=self._out_dtype)
        return self._product.linear(x, self.bias, self._out_dtype)

    def record(self, program: Program, x: Rows, *, into: str | Rows) -> Rows:
        """Append to a program what `rows` computes; rows `into` must have the same dtype."""
        return self._product.record(program, x, self.bias, into=into)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rows(x.reshape(-1, self.in_features).contiguous()).view(*x.shape[:-1], self.out_features)

    def take_rows(self, index: torch.Tensor) -> torch.Tensor:
        """Rows index [T] of the weight: [T, K]."""
        return self.operations.take_rows(self._packed, index, self._weight_dtype)

    def held_rows(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Those of the rows that this process has: see `Operations`."""
        return self.operations.held_rows(self._packed, index, self._weight_dtype)


class PackedEmbedding(nn.Module):
    """An embedding that shares its weight with the head and reads rows of the packed weight, [...] to [..., K]."""

    def __init__(self, head: PackedLinear) -> None:
        super().__init__()
        self.shared_weight = head
        self.held_rows = head.held_rows

    @property
    def weight(self) -> torch.Tensor:
        """What modules may ask of the weight; it has no numbers."""
        return self.shared_weight.weight

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.shared_weight.take_rows(token_ids.reshape(-1)).view(*token_ids.shape, -1)


class InterceptedWeight(torch.Tensor):
    """A weight that a module passes to `F.linear` itself: that call runs Baton's product, all others see a tensor."""

    product: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
    cast: Callable[[torch.dtype], InterceptedWeight]
    adaptable: AdaptableProduct
    packed: Any

    @staticmethod
    def of(
        weight: torch.Tensor, operations: Operations, adaptable: AdaptableProduct | None = None
    ) -> InterceptedWeight:
        """`adaptable`: the product of the same weight in another dtype, whose adapters this one has, too."""
        intercepted = weight.detach().clone().as_subclass(InterceptedWeight)
        casts = {weight.dtype: intercepted}

        def cast(dtype: torch.dtype) -> InterceptedWeight:
            if dtype not in casts:
                casts[dtype] = InterceptedWeight.of(weight.to(dtype), operations, intercepted.adaptable)
            return casts[dtype]

        intercepted.cast = cast
        weight = intercepted.as_subclass(torch.Tensor)
        intercepted.packed = packed = operations.pack(weight.detach())
        own = adaptable or AdaptableProduct(operations, packed, weight.shape[1], [("", weight.shape[0])])
        intercepted.adaptable = own

        def product(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            rows = x.reshape(-1, x.shape[-1]).contiguous()
            return own.linear(rows, bias, packed=packed).view(*x.shape[:-1], weight.shape[0])

        intercepted.product = product
        return intercepted

    def product_in(self, dtype: torch.dtype) -> tuple[AdaptableProduct, Any]:
        """The product, and its packed weight in a dtype."""
        return self.adaptable, self.cast(dtype).packed

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
            if func is functional.linear and isinstance(args[1], InterceptedWeight):
                bias = args[2] if len(args) > 2 else kwargs.get("bias")
                return args[1].product(args[0], bias)
            out = func(*args, **kwargs)
            if func in _CASTS and isinstance(args[0], InterceptedWeight) and isinstance(out, torch.Tensor):
                return args[0].cast(out.dtype)
            return out


def head_of(module: Any) -> nn.Module | None:
    """The module that computes a causal language model's logits; None for a model without one."""
    head = module.get_output_embeddings()
    return head if isinstance(head, nn.Module) else None


def replace_products(
    module: nn.Module,
    operations: Operations,
    row_quantum: int,
    release: Callable[[nn.Module], None],
    head: nn.Module | None = None,
) -> None:
    """Replace every product in place. `release` is called with each module whose weights have been packed.

    `head`: the last layer, if that is not the head of a causal language model. Its product is float32: rounded to
    bfloat16, the two best logits would be equal in about 2 % of all steps.

    An embedding that shares its weight with the head reads the head's packed weight (`PackedEmbedding`).
    """
    from transformers.pytorch_utils import Conv1D

    embeddings = _embeddings(module)
    head = head or head_of(module)
    for parent, name, child in children_of(module):
        out_dtype = torch.float32 if child is head else None
        if isinstance(child, StoredLinear):
            shared = id(child.stored)
            packed = PackedLinear(operations, child.held(), child.bias, child.dtype, out_dtype)
        elif is_linear(child):
            shared = child.weight.data_ptr()
            weight = child.weight.detach().T.contiguous() if isinstance(child, Conv1D) else child.weight.detach()
            packed = PackedLinear(operations, weight, child.bias, weight.dtype, out_dtype)
        else:
            continue
        setattr(parent, name, packed)
        if (tied := embeddings.get(shared)) is not None:
            look_rows_up_in(*tied, PackedEmbedding(packed))
        release(child)
    for parent, name, child in children_of(module):
        if isinstance(child, StoredEmbedding):  # one that the head does not share
            packed = PackedLinear(operations, read_packed(child.stored), None, child.dtype)
            setattr(parent, name, PackedEmbedding(packed))
    for part in module.modules():
        if isinstance(part, nn.Embedding):
            if operations.ranks.shard.size > 1 and not isinstance(part.weight, AbsentWeight):
                _divide_embedding(part, operations, release)
            continue
        if is_experts(part):
            object.__setattr__(part, "baton_experts", PackedExperts(operations, part, row_quantum, release))
            release(part)
            continue
        if isinstance(part, ChosenProduct):
            part.pack(release)
            continue
        held: dict[str, AdaptableProduct | None] = {}
        for name, parameter in list(part.named_parameters(recurse=False)):
            held[name] = None
            if parameter.dim() == 2:
                delattr(part, name)
                weight = InterceptedWeight.of(parameter, operations)
                object.__setattr__(part, name, weight)
                if name == "weight":  # of a router, which a mixture may multiply
                    object.__setattr__(part, "product_in", weight.product_in)
                held[name] = weight.adaptable
        if any(held.values()):
            hold_parameters(part, held)
    # The other parameters (embeddings, norms) are in the mapped file; copies let its pages be unmapped.
    for parameter in module.parameters():
        parameter.data = parameter.data.clone()


def _divide_embedding(embedding: nn.Embedding, operations: Operations, release: Callable[[nn.Module], None]) -> None:
    """Leave this rank its part of an embedding's rows; each row comes from the rank that has it."""
    weight = embedding.weight.detach()
    packed, dtype = operations.pack(weight), weight.dtype
    release(embedding)

    def rows(token_ids: torch.Tensor) -> torch.Tensor:
        return operations.take_rows(packed, token_ids.reshape(-1), dtype).view(*token_ids.shape, -1)

    take_weight(embedding, rows)
    # Adapters that bring base weights have these rows compared.
    object.__setattr__(embedding, "held_rows", partial(operations.held_rows, packed, dtype=dtype))


def _embeddings(module: nn.Module) -> dict[int, tuple[nn.Module, str]]:
    """The parents and names of embeddings, by what identifies a weight that the head may share."""
    embeddings = {}
    for parent in module.modules():
        for name, part in parent.named_children():
            if isinstance(part, StoredEmbedding):
                embeddings[id(part.stored)] = (parent, name)
            elif isinstance(part, nn.Embedding) and not isinstance(part.weight, AbsentWeight):
                embeddings[part.weight.data_ptr()] = (parent, name)
    return embeddings


class ProductWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, collects the names of torch's products in `missed`, except outer products, which sum nothing."""

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
