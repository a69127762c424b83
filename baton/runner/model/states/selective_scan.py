"""Mamba (arXiv 2312.00752) on Baton's operations, in the place of a transformers module that computes the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from baton.runner.adapters.adaptable import AdaptableProduct
from baton.runner.backends.cpu.kernels.buffers import Rows
from baton.runner.backends.cpu.kernels.programs.program import Program
from baton.runner.backends.operations import Operations
from baton.runner.model.states.gates import PlainGate
from baton.runner.model.states.keepers import HasPagedStates, RecordedRecurrence, RecurrentRows
from baton.runner.model.states.mixers import GatedStateMixer, columns_of, filter_of

OWN_NORMS = ("dt_layernorm", "b_layernorm", "c_layernorm")
"""The norms of steps, keys and queries, which some have."""


class _Norm(NamedTuple):
    """A root mean square norm of steps, keys or queries."""

    weight: torch.Tensor
    eps: float
    plus_one: bool

    @classmethod
    def of(cls, norm: Any, ones: torch.Tensor) -> _Norm | None:
        """What a part computes whose weight was recognised, or which has none: then it is `ones`.

        Raises AttributeError for what is no norm.
        """
        if norm is None:
            return None
        return cls(getattr(norm, "rms_weight", ones), norm.eps, getattr(norm, "plus_one", False))

    def rows(self, operations: Operations, x: torch.Tensor) -> torch.Tensor:
        """The norm of x [T, N]."""
        return operations.rms_norm(x.contiguous(), self.weight, self.eps, plus_one=self.plus_one)

    def record(self, program: Program, x: Rows, *, into: str) -> Rows:
        """Append to a program what `rows` computes."""
        return program.rms_norm(x, self.weight, self.eps, plus_one=self.plus_one, into=into)


class SelectiveScan(GatedStateMixer):
    """Values are convolved, and give steps, keys and queries themselves. Each channel is a head with values of one
    number, a step, and decays of its own."""

    def __init__(self, operations: Operations, child: Any) -> None:
        super().__init__(operations, child.layer_idx)
        self._in, self._in_bias = self._product(("in_proj", child.in_proj))
        self._selected, self._selected_bias = self._product(("x_proj", child.x_proj))
        self._step, step_bias = self._product(("dt_proj", child.dt_proj))
        self._step_bias = None if step_bias is None else step_bias.float()
        self._out, self._out_bias = self._product(("out_proj", child.out_proj))
        self._by = filter_of(child.conv1d, "silu")
        self._rates = -child.A_log.detach().float().exp().T.contiguous()
        self._skip = child.D.detach().float()
        self._norm = PlainGate()
        key_dim, num_channels = self._rates.shape
        self._num_channels = num_channels
        self._widths = [self._step.num_inputs, key_dim, key_dim]
        """Columns of steps, as their product takes them, of keys and of queries."""
        like = child.conv1d.weight.detach()
        norms = zip((getattr(child, name, None) for name in OWN_NORMS), self._widths, strict=True)
        self._norms = [_Norm.of(norm, like.new_ones(width)) for norm, width in norms]

    @property
    def products(self) -> Sequence[AdaptableProduct]:
        # transformers multiplies steps with the weight of their layer, which has no adapters.
        return self._in, self._selected, self._out

    def rows(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sample_rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        mixed, gate = self._in.linear(x, self._in_bias).chunk(2, dim=-1)
        value = self.baton_attend.states.convolve(self.layer_idx, mixed, self._by)
        selected = torch.split(self._selected.linear(value, self._selected_bias), self._widths, dim=-1)
        step, key, query = (
            rows if norm is None else norm.rows(self._operations, rows)
            for norm, rows in zip(self._norms, selected, strict=True)
        )
        sizes = self._operations.gate(self._step.linear(step.contiguous(), None), "softplus", self._step_bias, None)
        rows = RecurrentRows(
            query.unsqueeze(1),
            key.unsqueeze(1),
            value.unsqueeze(2),
            sizes,
            sizes,
            1.0,
            None,
            self._num_channels,
            has_delta_rule=False,
            skip=self._skip,
            rates=self._rates,
        )
        return self._finished(x, self.baton_attend.states.recur(self.layer_idx, rows), gate, sample_rows)

    def record(
        self, program: Program, x: Rows, cos: Rows, sin: Rows, paged: HasPagedStates, *, sampling: bool, into: str
    ) -> Rows:
        made = self._in.record(program, x, self._in_bias, into="state input")
        mixed, gate = columns_of(made, *[self._num_channels] * 2)
        value = paged.states.record_convolution(program, self.layer_idx, mixed, self._by, into="convolved")
        selected = self._selected.record(program, value, self._selected_bias, into="selected")
        step, key, query = (
            rows if norm is None else norm.record(program, rows, into=f"normed {name}")
            for norm, rows, name in zip(self._norms, columns_of(selected, *self._widths), OWN_NORMS, strict=True)
        )
        steps = self._step.record(program, step, None, into="steps")
        sizes = program.gate(steps, "softplus", self._step_bias, None, into="step sizes")
        out = paged.states.record_recurrence(
            program,
            self.layer_idx,
            RecordedRecurrence(query, key, value, sizes, sizes),
            1.0,
            None,
            has_delta_rule=False,
            skip=self._skip,
            rates=self._rates,
            into="recurred",
        )
        return self._record_finished(program, out, gate, sampling=sampling, into=into)
