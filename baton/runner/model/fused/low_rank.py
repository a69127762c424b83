"""Products with low-rank terms: product(x) + up(down(x)), as layers have them that share the weights of the product.

Zamba2's parts are told the number of their layer with each call, and choose the terms of that layer. Which they choose
is seen in a call (`watched_terms`). In Gemma 3n a layer adds such a term, and the norm of it, to its rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import nn

from baton.runner.adapters.adaptable import AdaptableProduct, HasProducts
from baton.runner.backends.cpu.kernels.buffers import Rows
from baton.runner.backends.cpu.kernels.product import Activation
from baton.runner.backends.cpu.kernels.programs.program import Program
from baton.runner.backends.operations import Operations
from baton.runner.backends.weight_rows import rows_in
from baton.runner.model.fused.rows import FusedNorm
from baton.runner.model.stored.layers import weight_of


class Term(NamedTuple):
    """What is added to a product: up(down(x)), neither with a bias."""

    path: str
    """The name of the module that has both as its parts 0 and 1."""
    down: nn.Linear
    up: nn.Linear

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.up.out_features, self.down.in_features


@contextmanager
def watched_terms(part: nn.Module) -> Iterator[list[Term]]:
    """The terms that a part computes in the body, in this order."""
    called: list[Term] = []
    handles = []
    for path, child in part.named_modules():
        pair = [*child.children()] if isinstance(child, nn.Sequential) else []
        if len(pair) == 2 and all(isinstance(linear, nn.Linear) and linear.bias is None for linear in pair):
            term = Term(path, *pair)  # type: ignore[arg-type]
            handles.append(child.register_forward_hook(lambda *_, term=term: called.append(term)))
    try:
        yield called
    finally:
        for handle in handles:
            handle.remove()


def terms_of(products: Mapping[str, nn.Linear], called: Sequence[Term]) -> dict[str, Term]:
    """The term of each product that may have one, by name: each is that of the first product of its shape without one.

    Who asks compares what they compute. A term that fits none is left out.
    """
    found: dict[str, Term] = {}
    for term in called:
        shapes = {name: (part.out_features, part.in_features) for name, part in products.items() if name not in found}
        name = next((name for name, shape in shapes.items() if shape == term.shape), None)
        if name is not None:
            found[name] = term
    return found


class TermedProducts:
    """Products of the same rows side by side, with their terms."""

    def __init__(
        self,
        operations: Operations,
        products: Mapping[str, nn.Linear],
        terms: Mapping[str, Term],
        own_rows: Mapping[str, range] | None = None,
    ) -> None:
        """`own_rows`: which of each product's outputs this rank has to itself; None: it has all, as all ranks do."""
        self._parts: list[tuple[AdaptableProduct, tuple[AdaptableProduct, AdaptableProduct] | None]] = []
        self._widths: list[int] = []
        for name, linear in products.items():
            own = None if own_rows is None else own_rows[name]
            product, term = _product(operations, name, linear, own), None
            if name in terms:
                path, down, up = terms[name]
                term = _product(operations, f"{path}.0", down), _product(operations, f"{path}.1", up, own)
            self._parts.append((product, term))
            self._widths.append(linear.out_features if own is None else len(own))

    @property
    def products(self) -> list[AdaptableProduct]:
        return [one for product, term in self._parts for one in (product, *(term or ()))]

    @property
    def num_inputs(self) -> int:
        return self._parts[0][0].num_inputs

    def keep(self, index: torch.Tensor) -> None:
        """Go on with the rows `index` alone, here and in all products that are computed behind these in the step."""
        self._parts[0][0].keep(index)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [T, K] to the outputs of all products [T, N], plus bias [N]."""
        outputs = []
        for (product, term), own_bias in zip(self._parts, self._biases(bias), strict=True):
            out = product.linear(x, own_bias)
            outputs.append(out if term is None else out + term[1].linear(term[0].linear(x)))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def record(self, program: Program, x: Rows, bias: torch.Tensor | None, *, into: str) -> Rows:
        """Append to a program what `linear` computes."""
        outputs = []
        for place, ((product, term), own_bias) in enumerate(zip(self._parts, self._biases(bias), strict=True)):
            out = product.record(program, x, own_bias, into=f"part {place} of {into}")
            if term is not None:
                low = term[0].record(program, x, None, into=f"low {place} of {into}")
                added = term[1].record(program, low, None, into=f"term {place} of {into}")
                # Not in place: ranks may share the rows of a product.
                out = program.add(out, added, 1.0, into=f"sum {place} of {into}")
            outputs.append(out)
        if len(outputs) == 1:
            return outputs[0]
        every = program.scratch(into, sum(self._widths), sampled=x.sampled)
        for out, end in zip(outputs, accumulate(self._widths), strict=True):
            program.copy_columns(out, every, width=out.width, to=end - out.width)
        return every

    def _biases(self, bias: torch.Tensor | None) -> Sequence[torch.Tensor | None]:
        return [None] * len(self._parts) if bias is None else torch.split(bias, self._widths)


def _product(operations: Operations, name: str, linear: nn.Linear, own: range | None = None) -> AdaptableProduct:
    """The product of a linear layer. `own`: the outputs that this rank has to itself; None: all ranks have all."""
    weight = weight_of(linear)
    if own is None:
        return AdaptableProduct.of_layer(operations, name, weight)
    packed = operations.pack_own(*rows_in([weight], [own]))
    return AdaptableProduct(operations, packed, weight.shape[1], [(name, weight.shape[0])], [own])


class TermedMlp(nn.Module, HasProducts):
    """A gated MLP whose product of gate and up has a term: down(act(gate) * up)."""

    def __init__(
        self,
        operations: Operations,
        gate_up: Mapping[str, nn.Linear],
        terms: Mapping[str, Term],
        down: tuple[str, nn.Linear],
        activation: Activation,
    ) -> None:
        """`gate_up`: one product of the rows of gate and then those of up, or two."""
        super().__init__()
        self._operations = operations
        self._gate_up = TermedProducts(operations, gate_up, terms)
        biases = [part.bias for part in gate_up.values()]
        self._gate_up_bias = None if biases[0] is None else torch.cat([bias.detach() for bias in biases])
        self._down = AdaptableProduct.of_layer(operations, down[0], weight_of(down[1]))
        self._down_bias = None if down[1].bias is None else down[1].bias.detach().clone()
        self._activation = activation

    @property
    def products(self) -> Sequence[AdaptableProduct]:
        return [*self._gate_up.products, self._down]

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, K] to [T, K]."""
        gate, up = (half.contiguous() for half in self._gate_up.linear(x, self._gate_up_bias).chunk(2, dim=1))
        inner = self._operations.multiply(up, self._operations.activate(gate, self._activation), None)
        return self._down.linear(inner, self._down_bias)

    def record(self, program: Program, x: Rows, *, into: str) -> Rows:
        """Append to a program what `rows` computes."""
        both = self._gate_up.record(program, x, self._gate_up_bias, into="gate and up")
        half = both.width // 2
        gate = program.activate(both.columns(0, half), self._activation, into="activated")
        inner = program.multiply(both.columns(half, both.width), gate, None, into="inner")
        return self._down.record(program, inner, self._down_bias, into=into)

    def forward(self, x: torch.Tensor, layer_idx: int | None = None) -> torch.Tensor:
        """`layer_idx`: what the replaced module is told with each call, and known here."""
        return self.rows(x.reshape(-1, x.shape[-1]).contiguous()).view(x.shape)


class LowRankResidual(nn.Module, HasProducts):
    """Rows plus the norm of a low-rank term of them: x + norm(up(down(x)))."""

    def __init__(self, operations: Operations, down_and_up: Mapping[str, nn.Linear], norm: FusedNorm) -> None:
        """`down_and_up`: neither has a bias."""
        super().__init__()
        self._down, self._up = (_product(operations, name, linear) for name, linear in down_and_up.items())
        self._norm = norm

    @property
    def products(self) -> Sequence[AdaptableProduct]:
        return self._down, self._up

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, K] to [T, K]."""
        return x + self._norm.rows(self._up.linear(self._down.linear(x)))

    def record(self, program: Program, x: Rows, *, into: str) -> Rows:
        """Append to a program what `rows` computes."""
        low = self._down.record(program, x, None, into="low residual")
        normed = self._norm.record(program, self._up.record(program, low, None, into="residual term"), into=into)
        return program.add(x, normed, 1.0, into=normed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rows(x.reshape(-1, x.shape[-1]).contiguous()).view(x.shape)
