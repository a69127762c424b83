"""Layers that keep a state on Baton's operations, each in the place of a transformers module that computes the same.

A candidate has the parts of such a layer; what it computes of some rows, and what it asks of its state, decides
(`recognition.py`). As for all mixers, `rows` is for Baton's loop and `record` for programs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import nn

from baton.runner.adapters.adaptable import AdaptableProduct, HasProducts
from baton.runner.backends.cpu.kernels.buffers import Rows
from baton.runner.backends.cpu.kernels.errors import KernelArgumentError
from baton.runner.backends.cpu.kernels.programs.program import Program
from baton.runner.backends.cpu.kernels.rows import NO_LIMITS
from baton.runner.backends.operations import Operations
from baton.runner.backends.weight_rows import rows_in
from baton.runner.model.states.gates import DecayGate, GatedNorm, PlainGate
from baton.runner.model.states.keepers import (
    DELTA_RULE_NORM_EPS,
    Convolution,
    HasPagedStates,
    HasStates,
    RecordedRecurrence,
    RecurrentRows,
)
from baton.runner.model.stored.layers import weight_of


class StateMixer(nn.Module, HasProducts):
    """What mixers with states have in common."""

    baton_attend: HasStates
    _in: AdaptableProduct
    _out: AdaptableProduct

    def __init__(self, operations: Operations, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self._operations = operations

    @property
    def products(self) -> Sequence[AdaptableProduct]:
        return self._in, self._out

    def rows(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sample_rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [T, K] to [T, K], without angles; with `sample_rows`, which may be empty, only these rows."""
        raise NotImplementedError

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        nothing = hidden_states.new_empty(hidden_states.shape[1], 0)
        return self.rows(hidden_states[0].contiguous(), nothing, nothing).unsqueeze(0)

    def record(
        self, program: Program, x: Rows, cos: Rows, sin: Rows, paged: HasPagedStates, *, sampling: bool, into: str
    ) -> Rows:
        """Append to a program what `rows` computes. Raises KernelArgumentError."""
        raise KernelArgumentError("part", f"is a {type(self).__name__}, which programs have no operations for")

    def _product(
        self, *linear: tuple[str, nn.Linear], order: Sequence[range] = ()
    ) -> tuple[AdaptableProduct, torch.Tensor | None]:
        """The product of these linear layers, stacked, and their biases.

        `order`: the stacked outputs as the product is to have them, if not as they are; a layer's stay together.
        """
        modules = [(name, part.out_features) for name, part in linear]
        weights = [weight_of(part) for _, part in linear]
        packed = self._operations.pack(*(rows_in(weights, order) if order else weights))
        known = next((part.bias for _, part in linear if part.bias is not None), None)
        bias = None
        if known is not None:
            biases: list[torch.Tensor] = [
                known.new_zeros(part.out_features) if part.bias is None else part.bias for _, part in linear
            ]
            bias = torch.cat(biases).detach()
            bias = torch.cat([bias[rows.start : rows.stop] for rows in order]) if order else bias
        return AdaptableProduct(self._operations, packed, linear[0][1].in_features, modules, order), bias


class GatedStateMixer(StateMixer):
    """A mixer whose recurrence's outputs are gated, and mostly normed, before the last product."""

    _norm: GatedNorm | PlainGate
    _out_bias: torch.Tensor | None

    def _finished(
        self, x: torch.Tensor, out: torch.Tensor, gate: torch.Tensor, sample_rows: torch.Tensor | None
    ) -> torch.Tensor:
        """What the mixer gives for rows x [T, K], from outputs [T, ...] and their gates; `sample_rows`: as `rows`."""
        if sample_rows is not None:
            self._in.keep(sample_rows)
            out, gate = out[sample_rows], gate[sample_rows]
        if out.shape[0] == 0:
            return x[:0]
        return self._out.linear(self._norm.rows(self._operations, out, gate), self._out_bias)

    def _record_finished(self, program: Program, out: Rows, gate: Rows, *, sampling: bool, into: str) -> Rows:
        """Append to a program what `_finished` computes; with `sampling` only for the rows that sample."""
        if sampling:
            out = program.take_sampled(out, into="sampled recurred")
            gate = program.take_sampled(gate, into="sampled gate")
        normed = self._norm.record(program, out, gate, into="gated")
        return self._out.record(program, normed, self._out_bias, into=into)


class ShortConvolution(StateMixer):
    """A gated short convolution (LFM2): out(c * convolve(b * x)), where in gives b, c and x."""

    def __init__(self, operations: Operations, child: Any) -> None:
        super().__init__(operations, child.layer_idx)
        self._in, self._in_bias = self._product(("in_proj", child.in_proj))
        self._out, self._out_bias = self._product(("out_proj", child.out_proj))
        self._by = filter_of(child.conv, None)

    def rows(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sample_rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        before, behind, rows = self._in.linear(x, self._in_bias).chunk(3, dim=-1)
        rows = self._operations.multiply(before, rows, None)
        out = self._operations.multiply(behind, self.baton_attend.states.convolve(self.layer_idx, rows, self._by), None)
        if sample_rows is not None:
            self._in.keep(sample_rows)
            out = out[sample_rows]
        return x[:0] if out.shape[0] == 0 else self._out.linear(out, self._out_bias)

    def record(
        self, program: Program, x: Rows, cos: Rows, sin: Rows, paged: HasPagedStates, *, sampling: bool, into: str
    ) -> Rows:
        made = self._in.record(program, x, self._in_bias, into="state input")
        before, behind, rows = columns_of(made, *[made.width // 3] * 3)
        rows = program.multiply(before, rows, None, into="convolution input")
        convolved = paged.states.record_convolution(program, self.layer_idx, rows, self._by, into="convolved")
        out = program.multiply(behind, convolved, None, into="gated")
        if sampling:
            out = program.take_sampled(out, into="sampled gated")
        return self._out.record(program, out, self._out_bias, into=into)


class DeltaNetParts(NamedTuple):
    """How the parts of a module are called that may be a Gated DeltaNet."""

    inputs: Mapping[str, str]
    """The linear layers of its input, and what each of them gives, in its order: queries (q), keys (k), values (v),
    gates (z), betas (b) and steps of decay (a). In this mapping all of them have the order of this list."""
    norm: str
    out: str
    by_key_head: bool = False
    """Whether each of these layers gives everything of the first head of keys, then of the second one, and so on."""
    behind: Mapping[str, str] = {}
    """The linear layers that what `inputs` gives goes through: of gates (z) and of steps (a)."""
    decay: str = ""
    """The part that has the parameters of decay; empty for the module itself."""

    @property
    def names(self) -> set[str]:
        """The module's own parts."""
        parts = (*self.inputs, *self.behind.values(), "conv1d", self.norm, self.out)
        return {part.partition(".")[0] for part in parts}


class GatedDeltaNet(GatedStateMixer):
    """Gated DeltaNet (arXiv 2412.06464): queries, keys and values are convolved, the outputs of the recurrence normed
    in each head and gated."""

    def __init__(self, operations: Operations, child: Any, parts: DeltaNetParts) -> None:
        super().__init__(operations, child.layer_idx)
        if hasattr(child, "num_k_heads"):
            self._heads = groups, heads = child.num_k_heads, child.num_v_heads
            self._dims = key_dim, value_dim = child.head_k_dim, child.head_v_dim
        else:
            self._heads = groups, heads = child.num_heads, child.num_heads
            self._dims = key_dim, value_dim = child.head_dim, child.head_dim
        order: list[range] = []
        if parts.by_key_head:
            values = heads // groups * value_dim
            of_group = {
                "q": key_dim,
                "k": key_dim,
                "v": values,
                "z": values,
                "b": heads // groups,
                "a": heads // groups,
            }
            order = _part_by_part([[of_group[part] for part in given] for given in parts.inputs.values()], groups)
        linear = {name: child.get_submodule(name) for name in (*parts.inputs, *parts.behind.values(), parts.out)}
        given = [(name, linear[name]) for name in parts.inputs]
        self._in, self._in_bias = self._product(*given, order=order)
        self._behind = {part: self._product((name, linear[name])) for part, name in parts.behind.items()}
        self._out, self._out_bias = self._product((parts.out, linear[parts.out]))
        self._by = filter_of(child.conv1d, "silu")
        of_decay = child.get_submodule(parts.decay)
        self._step_bias = of_decay.dt_bias.detach().float()
        rates = of_decay.A_log.detach().float().exp().flatten()
        # Where each row of a head's state decays by itself, there are more steps than heads.
        self._decay = DecayGate.of(of_decay, rates.repeat_interleave(len(self._step_bias) // heads))
        self._beta_factor: torch.Tensor | None = None
        if getattr(child, "allow_neg_eigval", False):
            self._beta_factor = torch.full_like(rates, 2.0)
        self._norm = GatedNorm.of(getattr(child, parts.norm))

    @property
    def products(self) -> Sequence[AdaptableProduct]:
        return self._in, *(product for product, _ in self._behind.values()), self._out

    @property
    def _widths(self) -> list[int]:
        """Columns of what is convolved, of gates, of betas and of steps, as the first product gives them."""
        (groups, heads), (key_dim, value_dim) = self._heads, self._dims
        full = {"z": heads * value_dim, "a": len(self._step_bias)}
        gates, steps = (self._behind[part][0].num_inputs if part in self._behind else full[part] for part in ("z", "a"))
        return [2 * groups * key_dim + heads * value_dim, gates, heads, steps]

    def rows(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sample_rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        (groups, heads), (key_dim, value_dim) = self._heads, self._dims
        keys, values = groups * key_dim, heads * value_dim
        mixed, gate, beta, step = torch.split(self._in.linear(x, self._in_bias), self._widths, dim=-1)
        gate, step = (
            self._behind[part][0].linear(rows.contiguous(), self._behind[part][1]) if part in self._behind else rows
            for part, rows in (("z", gate), ("a", step))
        )
        convolved = self.baton_attend.states.convolve(self.layer_idx, mixed, self._by)
        query, key, value = torch.split(convolved, [keys, keys, values], dim=-1)
        limits, (function, scale, factor) = NO_LIMITS, self._decay
        decay = self._operations.gate(step, function, self._step_bias, factor, limits, scale)
        rows = RecurrentRows(
            query.view(-1, groups, key_dim),
            key.view(-1, groups, key_dim),
            value.view(-1, heads, value_dim),
            decay if decay.shape[1] == heads else decay.view(-1, heads, key_dim),
            self._operations.gate(beta, "sigmoid", None, self._beta_factor),
            key_dim**-0.5,
            DELTA_RULE_NORM_EPS,
            heads,
        )
        return self._finished(x, self.baton_attend.states.recur(self.layer_idx, rows), gate, sample_rows)

    def record(
        self, program: Program, x: Rows, cos: Rows, sin: Rows, paged: HasPagedStates, *, sampling: bool, into: str
    ) -> Rows:
        (groups, heads), (key_dim, value_dim) = self._heads, self._dims
        keys, values = groups * key_dim, heads * value_dim
        made = self._in.record(program, x, self._in_bias, into="state input")
        mixed, gate, beta, step = columns_of(made, *self._widths)
        gate, step = (
            self._behind[part][0].record(program, rows, self._behind[part][1], into=f"state input {part}")
            if part in self._behind
            else rows
            for part, rows in (("z", gate), ("a", step))
        )
        convolved = paged.states.record_convolution(program, self.layer_idx, mixed, self._by, into="convolved")
        query, key, value = columns_of(convolved, keys, keys, values)
        limits, (function, scale, factor) = NO_LIMITS, self._decay
        decay = program.gate(step, function, self._step_bias, factor, limits, scale, into="decay")
        rows = RecordedRecurrence(
            query, key, value, decay, program.gate(beta, "sigmoid", None, self._beta_factor, into="beta")
        )
        out = paged.states.record_recurrence(
            program, self.layer_idx, rows, key_dim**-0.5, DELTA_RULE_NORM_EPS, into="recurred"
        )
        return self._record_finished(program, out, gate, sampling=sampling, into=into)


class Mamba2(GatedStateMixer):
    """Mamba-2 (arXiv 2405.21060): values, keys and queries are convolved, and the outputs of the recurrence, which has
    one step of each head for decay and values, gated and normed, or only gated.

    What the first product takes may be multiplied by a number, and each column that it gives by one, as in Falcon-H1.
    Here its input is multiplied by as much as makes the gates right; the rest is part of the convolution and the steps.
    """

    def __init__(self, operations: Operations, child: Any) -> None:
        super().__init__(operations, child.layer_idx)
        self._in, self._in_bias = self._product(("in_proj", child.in_proj))
        self._out, self._out_bias = self._product(("out_proj", child.out_proj))
        self._by = filter_of(child.conv1d, "silu")
        self._groups, self._heads = child.n_groups, child.num_heads
        self._dims = child.ssm_state_size, child.head_dim
        self._step_bias = child.dt_bias.detach().float()
        low, high = child.time_step_limit
        self._step_limits = float(low), float(high)
        self._decay = -child.A_log.detach().float().exp()
        self._skip = child.D.detach().float()
        self._norm = PlainGate() if isinstance(child.norm, nn.Identity) else GatedNorm.of(child.norm, {1, self._groups})
        self._input_factor = 1.0
        self._step_scale: torch.Tensor | None = None
        if (factors := getattr(child, "mup_vector", None)) is not None:
            self._multiply(factors.detach().float().flatten(), child.ssm_in_multiplier)

    def _multiply(self, factors: torch.Tensor, input_factor: float) -> None:
        """Multiply the first product's input by a number, and its columns by `factors`, whose gates have all the same
        one."""
        of_gates = float(factors[0])
        self._input_factor = input_factor * of_gates
        if self._in_bias is not None:
            self._in_bias = self._in_bias * of_gates
        _, values = self._widths
        rest = factors / of_gates
        mixed, self._step_scale = rest[values : -self._heads], rest[-self._heads :]
        self._by = replace(self._by, weight=self._by.weight * mixed[:, None])
        self._step_bias = self._step_bias / self._step_scale

    @property
    def _widths(self) -> tuple[int, int]:
        """Columns of all keys, as of all queries, and of all values."""
        return self._groups * self._dims[0], self._heads * self._dims[1]

    def rows(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sample_rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        keys, values = self._widths
        given = x if self._input_factor == 1.0 else x * self._input_factor
        made = self._in.linear(given, self._in_bias)
        gate, mixed, step = torch.split(made, [values, values + 2 * keys, self._heads], dim=-1)
        convolved = self.baton_attend.states.convolve(self.layer_idx, mixed, self._by)
        value, key, query = torch.split(convolved, [values, keys, keys], dim=-1)
        decay, beta = (
            self._operations.gate(step, "softplus", self._step_bias, factor, self._step_limits, self._step_scale)
            for factor in (self._decay, None)
        )
        rows = RecurrentRows(
            query.view(-1, self._groups, self._dims[0]),
            key.view(-1, self._groups, self._dims[0]),
            value.view(-1, self._heads, self._dims[1]),
            decay,
            beta,
            1.0,
            None,
            self._heads,
            has_delta_rule=False,
            skip=self._skip,
        )
        return self._finished(x, self.baton_attend.states.recur(self.layer_idx, rows), gate, sample_rows)

    def record(
        self, program: Program, x: Rows, cos: Rows, sin: Rows, paged: HasPagedStates, *, sampling: bool, into: str
    ) -> Rows:
        keys, values = self._widths
        given = x if self._input_factor == 1.0 else program.scale(x, self._input_factor, into="scaled input")
        made = self._in.record(program, given, self._in_bias, into="state input")
        gate, mixed, step = columns_of(made, values, values + 2 * keys, self._heads)
        convolved = paged.states.record_convolution(program, self.layer_idx, mixed, self._by, into="convolved")
        value, key, query = columns_of(convolved, values, keys, keys)
        bias, limits, scale = self._step_bias, self._step_limits, self._step_scale
        decay, beta = (
            program.gate(step, "softplus", bias, factor, limits, scale, into=into_gates)
            for factor, into_gates in ((self._decay, "decay"), (None, "beta"))
        )
        rows = RecordedRecurrence(query, key, value, decay, beta)
        out = paged.states.record_recurrence(
            program, self.layer_idx, rows, 1.0, None, has_delta_rule=False, skip=self._skip, into="recurred"
        )
        return self._record_finished(program, out, gate, sampling=sampling, into=into)


def columns_of(rows: Rows, *widths: int) -> list[Rows]:
    """Rows of so many columns each, one behind the other."""
    ends = list(accumulate(widths))
    return [rows.columns(end - width, end) for width, end in zip(widths, ends, strict=True)]


def filter_of(conv: nn.Conv1d, activation: Any) -> Convolution:
    weight = conv.weight.detach().squeeze(1).float().contiguous()
    bias = None if conv.bias is None else conv.bias.detach().float()
    return Convolution(weight, bias, activation, weight.shape[0])


def _part_by_part(widths: Sequence[Sequence[int]], groups: int) -> list[range]:
    """Where the stacked outputs of linear layers are if those of each part of a layer are to be neighbours.

    `widths`: for each layer how many outputs a group has in each part; a layer has those of one group after the other.
    """
    order: list[range] = []
    first = 0
    for of_layer in widths:
        behind = first + groups * sum(of_layer)
        for end, width in zip(accumulate(of_layer), of_layer, strict=True):
            starts = range(first + end - width, behind, sum(of_layer))
            order += [range(start, start + width) for start in starts]
        first = behind
    return order
