"""What adapters may change: products, those of experts, and the embedding; and the adapters of the rows of a step.

The parts of a mixture of experts hold their weights as parameters, which adapters name as such. To rows of the
embedding an adapter adds factor * B A, of which A has a column for each token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from baton.runner.backends.cpu.kernels.adapters import AdapterTable, StepAdapters
from baton.runner.backends.cpu.kernels.buffers import Rows
from baton.runner.backends.cpu.kernels.product import Activation
from baton.runner.backends.cpu.kernels.programs.program import Program
from baton.runner.backends.low_rank import LowRank, Outputs, RowAdapters, parts_of
from baton.runner.backends.operations import Operations
from baton.runner.backends.weight_rows import Weight

HeldRows = tuple[torch.Tensor, torch.Tensor]
"""Places among the rows that were asked for, and these rows: see `Operations.held_rows`."""


@dataclass(frozen=True, slots=True)
class LoadedAdapters:
    """The adapters that are loaded at one time. It is never changed: who computes with it keeps it."""

    products: AdapterTable = field(default_factory=AdapterTable)
    """By number of the product, then by slot: what `Operations.adapt` returned, or None."""
    experts: Sequence[Sequence[Sequence[Any] | None]] = ()
    """By number of the experts' product, by slot, and by expert: what `Operations.adapt` returned, or None."""
    embeddings: Sequence[Any] = ()
    """By slot: what the adapter adds to embeddings, or None."""


class RowsOfStep:
    """The adapters of the rows that are being computed: at first all rows of a step, later those that are left of them.

    Written and read by the thread that computes steps.
    """

    def __init__(self) -> None:
        self.table = LoadedAdapters()
        self.slots: torch.Tensor | None = None
        """Int32 [rows] on the CPU: the slot of each row's adapter, or -1; None: no row has one."""
        self.in_step: Sequence[int] = ()
        """The slots that rows of the step have. What is computed how depends on these alone: another adapter may be
        loaded in one rank already, and not yet in the next one."""
        self.row_quantum = 1
        """A product may be given fewer padding rows than this."""
        self.num_probed = 0
        """The number of rows of the step that finds out which products compute all rows; 0 in any other step."""

    def begin(self, slots: torch.Tensor | None) -> None:
        """Begin a step whose rows have these slots."""
        self.slots = slots
        self.in_step = () if slots is None else [slot for slot in torch.unique(slots).tolist() if slot >= 0]

    def keep(self, index: torch.Tensor) -> None:
        """Go on with the rows `index` alone."""
        if self.slots is not None:
            self.slots = self.slots[index.to(self.slots.device)]

    def keep_first(self, count: int) -> None:
        """Go on with the first rows alone."""
        if self.slots is not None:
            self.slots = self.slots[:count]

    def of_product(self, num_rows: int) -> torch.Tensor | None:
        """The slots [rows] for a product of all rows that are left, and of padding behind them; None if none has one.

        Raises RuntimeError for a product of other rows.
        """
        if (slots := self.slots) is None:
            return None
        num_padding = num_rows - slots.shape[0]
        if not 0 <= num_padding < self.row_quantum:
            raise RuntimeError(f"a product of {num_rows} rows is not of the step's {slots.shape[0]} rows")
        return torch.cat((slots, slots.new_full((num_padding,), -1))) if num_padding else slots

    def of_step(self) -> StepAdapters | None:
        """The adapters for a program that computes all rows of the step; None if no row has one."""
        return None if self.slots is None else StepAdapters(self.slots, self.table.products)


class ModuleOutputs(NamedTuple):
    """Which outputs of a product are those of one module of the model."""

    module: str
    """The module's name: in a part that has products, from this part on; empty for the part itself."""
    first: int
    num_outputs: int


class _Adaptable:
    """What is the same for all products that adapters may change."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations
        self._number: int | None = None
        self._rows = _NO_ROWS
        self._num_rows: set[int] = set()

    def attach(self, number: int, rows: RowsOfStep) -> None:
        """Give the product its number in tables of adapters, and the rows of the steps to come."""
        self._number, self._rows = number, rows

    @property
    def is_adapted(self) -> bool:
        """Whether an adapter of the step's rows changes the product."""
        if self._rows.slots is None or self._number is None:
            return False
        of_slots = self._of_slots(self._number)
        return any(of_slots[slot] is not None for slot in self._rows.in_step)

    def _of_slots(self, number: int) -> Sequence[Any]:
        """What the adapters of all slots add to the product with this number."""
        raise NotImplementedError

    @property
    def computes_all_rows(self) -> bool:
        """Whether the step that was to find out gave it all of its rows, once each: for experts the rows they route."""
        return self._num_rows == {0}


class AdaptableProduct(_Adaptable):
    """A product of the model. Rows whose adapter changes it get what the adapter adds."""

    def __init__(
        self,
        operations: Operations,
        packed: Any,
        num_inputs: int,
        modules: Sequence[tuple[str, int]],
        rows: Sequence[range] = (),
    ) -> None:
        """`packed`: the weight of all modules, which are given by name and number of outputs, stacked; of a gated
        product the gate and up. `rows`: which of the stacked outputs the weight has, in its order, if not all of them
        or in another order; those of other heads are other ranks'.
        """
        super().__init__(operations)
        self.packed = packed
        self.num_inputs = num_inputs
        self._places = [(part.start, part.stop) for part in rows]
        self.modules: list[ModuleOutputs] = []
        first = 0
        for name, num_outputs in modules:
            self.modules.append(ModuleOutputs(name, first, num_outputs))
            first += num_outputs
        self._row_dtypes: set[torch.dtype] = set()
        self.other_shapes: set[tuple[int, int]] = set()
        """Outputs and inputs of the products that are computed in its place, if it is none itself."""

    @classmethod
    def of_layer(cls, operations: Operations, name: str, weight: Weight) -> AdaptableProduct:
        """The product with the weight [N, K] of one linear layer, whose name is given."""
        return cls(operations, operations.pack(weight), weight.shape[1], [(name, weight.shape[0])])

    @property
    def row_dtype(self) -> torch.dtype | None:
        """The dtype of the rows of the step that was to find out; None if it computed no rows, or some of each."""
        return next(iter(self._row_dtypes)) if len(self._row_dtypes) == 1 else None

    def keep(self, index: torch.Tensor) -> None:
        """Go on with the rows `index` alone, in this product and all that are computed behind it in the step."""
        self._rows.keep(index)

    def adapt(self, terms: Sequence[LowRank], dtype: torch.dtype) -> Any:
        """Prepare what an adapter adds to products of rows in `dtype`. All ranks get something, or none does."""
        own = parts_of(terms, self._places) if self._places else terms
        return self._operations.adapt(self.packed, own, dtype)

    def linear(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        packed: Any = None,
    ) -> torch.Tensor:
        """The product, as `Operations.linear` computes it, with the adapters of the step's rows.

        `packed`: the same weight in another dtype, that of x.
        """
        packed = self.packed if packed is None else packed
        return self._operations.linear(x, packed, bias, out_dtype=out_dtype, adapters=self._adapters(x))

    def gated_linear(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        """The gated product, as `Operations.gated_linear` computes it, with the adapters of the step's rows."""
        return self._operations.gated_linear(x, self.packed, activation=activation, adapters=self._adapters(x))

    def record(self, program: Program, x: Rows, bias: torch.Tensor | None, *, into: str | Rows) -> Rows:
        """Append to a program what `linear` computes."""
        return program.linear(x, self.packed, bias, into=into, product=self._number)

    def record_gated(self, program: Program, x: Rows, activation: Activation, *, into: str | Rows) -> Rows:
        """Append to a program what `gated_linear` computes."""
        return program.gated_linear(x, self.packed, activation, into=into, product=self._number)

    def _adapters(self, x: torch.Tensor) -> RowAdapters | None:
        if self._rows.num_probed:
            self._num_rows.add(x.shape[0] - self._rows.num_probed)
            self._row_dtypes.add(x.dtype)
        if self._number is None or not self.is_adapted:
            return None
        slots = self._rows.of_product(x.shape[0])
        return None if slots is None else RowAdapters(slots, self._of_slots(self._number))

    def _of_slots(self, number: int) -> Sequence[Any]:
        return self._rows.table.products[number]


class HasProducts(ABC):
    """A part of a model with products that adapters may change."""

    @property
    @abstractmethod
    def products(self) -> Sequence[AdaptableProduct]: ...


_NO_ROWS = RowsOfStep()
"""What a product that is not attached reads: no row has an adapter."""


def routed(slots: torch.Tensor | None, index: torch.Tensor, num_rows: int) -> torch.Tensor | None:
    """The slots [rows] of the rows `index`, and -1 for padding up to `num_rows`; None: none of them has an adapter."""
    if slots is None:
        return None
    own = slots[index.cpu()]
    if int(own.max()) < 0:
        return None
    return own if len(own) == num_rows else functional.pad(own, (0, num_rows - len(own)), value=-1)


class AdaptableExperts(_Adaptable):
    """One product of every expert of a mixture: gate and up, or down. An adapter has a part for each expert.

    Each expert computes the rows that were routed to it.
    """

    def __init__(
        self, operations: Operations, packed: Sequence[Any], num_outputs: int, num_inputs: int, num_stacked: int
    ) -> None:
        """`packed`: the weight of each expert; of a gated product gate and up. `num_stacked`: how many experts'
        weights, and parts of adapters, are stacked: behind those with products may be some that are never used."""
        super().__init__(operations)
        self.num_outputs = num_outputs
        self.num_inputs = num_inputs
        self.num_stacked = num_stacked
        self.packed = packed

    @property
    def num_experts(self) -> int:
        return len(self.packed)

    def slots(self, num_rows: int) -> torch.Tensor | None:
        """Int32 [rows] on the CPU: the slots of the rows that are to be routed, or -1; None: no adapter is for these
        experts, or no row has one."""
        rows = self._rows
        if rows.num_probed:
            self._num_rows.add(num_rows - rows.num_probed)
        return rows.of_product(num_rows) if self.is_adapted else None

    def _of_slots(self, number: int) -> Sequence[Any]:
        return self._rows.table.experts[number]

    def linear(
        self, x: torch.Tensor, expert: int, slots: torch.Tensor | None, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """The product of one expert and rows with these slots [rows], or none, as `Operations.linear` computes it."""
        return self._operations.linear(x, self.packed[expert], bias, adapters=self._adapters(expert, slots))

    def gated_linear(
        self, x: torch.Tensor, expert: int, slots: torch.Tensor | None, activation: Activation
    ) -> torch.Tensor:
        """The gated product of one expert and rows with these slots [rows], or none, as operations compute it."""
        adapters = self._adapters(expert, slots)
        return self._operations.gated_linear(x, self.packed[expert], activation=activation, adapters=adapters)

    def _adapters(self, expert: int, slots: torch.Tensor | None) -> RowAdapters | None:
        if slots is None or self._number is None:
            return None
        weights = [
            None if of_experts is None else of_experts[expert] for of_experts in self._rows.table.experts[self._number]
        ]
        return None if all(of_experts is None for of_experts in weights) else RowAdapters(slots, weights)

    def adapt(self, terms: Sequence[Sequence[LowRank]], dtype: torch.dtype) -> list[Any]:
        """Prepare what an adapter adds, for each expert, to products of rows in `dtype`."""
        return [
            self._operations.adapt(packed, of_expert, dtype) if of_expert else None
            for packed, of_expert in zip(self.packed, terms, strict=True)
        ]


def divided_among_experts(
    a: torch.Tensor, b: torch.Tensor, factor: float, num_experts: int, *, swapped: bool
) -> list[LowRank]:
    """The term of each expert in A [experts * rank, K] and B [outputs, rank * experts], as PEFT stacks them.

    In A the ranks of an expert are neighbours, in B those of all experts for one rank. `swapped`: A has the outputs and
    B the inputs, and what is added to an expert's weight is the transpose of B A.
    """
    of_a = a.view(num_experts, -1, a.shape[1])
    of_b = b.view(b.shape[0], -1, num_experts).permute(2, 0, 1)
    if swapped:
        of_a, of_b = of_b.transpose(1, 2), of_a.transpose(1, 2)
    return [
        LowRank(of_a[expert].contiguous(), factor, (Outputs(0, of_b[expert].contiguous()),))
        for expert in range(num_experts)
    ]


AdaptableParameters = Mapping[str, AdaptableProduct | AdaptableExperts | None]
"""What adapters may change in the parameters of a module, by their names and in the module's order; None: they must not
change this one."""


def hold_parameters(module: nn.Module, parameters: AdaptableParameters) -> None:
    """Say what adapters may change in a module whose parameters were packed."""
    object.__setattr__(module, "baton_parameters", parameters)


def held_parameters(module: nn.Module) -> AdaptableParameters:
    """What adapters may change in the parameters of a module; empty for one that has none."""
    held: AdaptableParameters = getattr(module, "baton_parameters", {})
    return held


@dataclass(frozen=True, slots=True)
class _EmbeddingAdapter:
    """What one adapter adds to the embedding."""

    columns: torch.Tensor
    """Float32 [vocabulary, rank], with the factor: A transposed."""
    packed: Any
    """B, packed in float32."""


class AdaptableEmbedding:
    """Adds to the rows that the embedding returns what the adapters of the step's rows add."""

    def __init__(
        self, name: str, part: nn.Module, rows: RowsOfStep, vocab_size: int, width: int, device: torch.device
    ) -> None:
        self.name = name
        self.vocab_size = vocab_size
        self.width = width
        self._part = part
        self._rows = rows
        self._device = device
        self._operations: Operations | None = None
        scale = getattr(part, "embed_scale", None)
        self._scale = 1.0 if scale is None else float(scale)
        part.register_forward_hook(self._add)

    @classmethod
    def of(cls, name: str, part: Any, rows: RowsOfStep, device: torch.device) -> AdaptableEmbedding | None:
        """The embedding of a model; None for a stage that has none."""
        if isinstance(part, nn.Embedding):
            return cls(name, part, rows, part.num_embeddings, part.embedding_dim, device)
        head = getattr(part, "shared_weight", None)
        return None if head is None else cls(name, part, rows, head.out_features, head.in_features, device)

    def adapt(self, operations: Operations, a: torch.Tensor, b: torch.Tensor, factor: float) -> _EmbeddingAdapter:
        """Prepare A [rank, vocabulary] and B [width, rank] of an adapter."""
        self._operations = operations
        return _EmbeddingAdapter((a.T * (factor * self._scale)).contiguous(), operations.pack_own(b.to(self._device)))

    def held_rows(self, index: torch.Tensor) -> HeldRows:
        """The rows among `index` of the weight, without its scale, that this process has: see `Operations`."""
        held: Callable[[torch.Tensor], HeldRows] | None = getattr(self._part, "held_rows", None)
        if held is not None:
            return held(index)
        assert isinstance(self._part, nn.Embedding)
        return torch.arange(len(index)), self._part.weight[index.to(self._part.weight.device)]

    def _add(self, _part: nn.Module, given: Any, out: torch.Tensor) -> torch.Tensor | None:
        slots = self._rows.slots
        if slots is None or all(embedding is None for embedding in self._rows.table.embeddings):
            return None
        token_ids: torch.Tensor = given[0].reshape(-1)
        rows = out.view(-1, out.shape[-1]).clone()
        for slot in torch.unique(slots).tolist():
            adapter: _EmbeddingAdapter | None = self._rows.table.embeddings[slot] if slot >= 0 else None
            if adapter is None or self._operations is None:
                continue
            own = (slots == slot).nonzero().flatten()
            t = adapter.columns[token_ids.cpu()[own]].to(rows.device)
            more = self._operations.linear(t, adapter.packed)
            own = own.to(rows.device)
            rows[own] = (rows[own].float() + more).to(rows.dtype)
        return rows.view(out.shape)
