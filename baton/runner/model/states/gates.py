"""How layers with states gate what their recurrence gives, and how their steps become decay."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from itertools import product
from typing import Any, NamedTuple

import torch

from baton.runner.backends.cpu.kernels.buffers import Rows
from baton.runner.backends.cpu.kernels.programs.program import Program
from baton.runner.backends.cpu.kernels.rows import GateActivation, GateFunction
from baton.runner.backends.operations import Operations
from baton.runner.backends.torch_states import gated_rms_norm


class GatedNorm(NamedTuple):
    """A root mean square norm of groups of columns, and a gate."""

    weight: torch.Tensor
    """[columns of a group], or [groups, columns of a group]."""
    eps: float
    activation: GateActivation
    gate_first: bool

    @classmethod
    def of(cls, norm: Any, num_groups: Iterable[int] = (1,)) -> GatedNorm:
        """What a module computes of rows and gates; `num_groups`: how many groups there may be.

        Raises TypeError for one that computes something else.
        """
        weight, eps = norm.weight.detach(), norm.variance_epsilon
        x, by = torch.randn(2, 5, len(weight), dtype=torch.float32, generator=torch.Generator().manual_seed(0))
        expected = copy.deepcopy(norm).cpu().float()(x, by)
        activations: tuple[GateActivation, ...] = ("silu", "sigmoid")
        for groups, activation, gate_first in product(num_groups, activations, (True, False)):
            of_groups = weight.view(groups, -1).clone()
            rows, gates = (part.view(len(x), groups, -1) for part in (x, by))
            own = gated_rms_norm(rows, gates, of_groups.cpu().float(), eps, activation, gate_first=gate_first)
            if torch.allclose(own.view(x.shape), expected, rtol=1e-4, atol=1e-5):
                return cls(of_groups[0] if groups == 1 else of_groups, eps, activation, gate_first)
        raise TypeError(f"{type(norm).__name__} is no norm with a gate")

    def rows(self, operations: Operations, x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        """The norm of rows of groups, x [T, ...] to [T, W], gated by as many columns."""
        x, by = (rows.view(len(rows), -1, self.weight.shape[-1]) for rows in (x, by))
        return operations.gated_rms_norm(
            x, by, self.weight, self.eps, self.activation, gate_first=self.gate_first
        ).flatten(1)

    def record(self, program: Program, x: Rows, by: Rows, *, into: str) -> Rows:
        """Append to a program what `rows` computes."""
        return program.gated_rms_norm(
            x, by, self.weight, self.eps, self.activation, gate_first=self.gate_first, into=into
        )


class PlainGate:
    """A gate without a norm: x * silu(gate)."""

    def rows(self, operations: Operations, x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        """Rows of heads, x [T, ...] to [T, W], gated by as many columns."""
        return operations.multiply(operations.multiply(x.flatten(1), by, None), by, "sigmoid")

    def record(self, program: Program, x: Rows, by: Rows, *, into: str) -> Rows:
        """Append to a program what `rows` computes."""
        return program.multiply(program.multiply(x, by, None, into="times gate"), by, "sigmoid", into=into)


class DecayGate(NamedTuple):
    """How steps become logarithms of decay: factor * function(step * scale)."""

    function: GateFunction
    scale: torch.Tensor | None
    factor: torch.Tensor

    @classmethod
    def of(cls, part: Any, rates: torch.Tensor) -> DecayGate:
        """What a part computes whose rates [N] are given: if it has a lower bound, that many times a sigmoid."""
        if getattr(part, "safe_gate", False):
            return cls("sigmoid", rates, torch.full_like(rates, part.lower_bound))
        return cls("softplus", None, -rates)
