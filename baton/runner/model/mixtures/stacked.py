"""Experts of transformers that its ExpertsInterface doesn't compute, as a module that Baton's experts take.

Their weights are stacked in two parameters, and they compute gated MLPs. Some take the rows of a step, which experts
each row has chosen, and their weights, and give rows of experts without weights as they are. Others take the rows of
all experts one after the other, multiplied with their weights, which are zero for experts that a row hasn't chosen.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from baton.runner.backends.routing import PLAIN_EXPERTS, ExpertKind
from baton.runner.model.comparison import agree, agree_in_parts, small_and_large_rows
from baton.runner.model.stored.layers import ExpertsOnFile, held_experts, hold_experts
from baton.runner.model.stored.plan import is_experts
from baton.runner.model.stored.weight import StoredWeight

Call = Literal["chosen", "all"]
"""What experts are given: rows, chosen experts and weights; or the rows of all experts, multiplied with weights."""


class StackedExperts(nn.Module):
    """Stands for such experts in a mixture: an experts module of transformers' kind, which has Baton compute them."""

    has_gate = True
    has_bias = False

    def __init__(
        self,
        activation: Callable[[torch.Tensor], torch.Tensor],
        gate_up: torch.Tensor | ExpertsOnFile,
        down: torch.Tensor | ExpertsOnFile,
        *,
        is_transposed: bool = False,
        kind: ExpertKind = PLAIN_EXPERTS,
    ) -> None:
        """Weights [E, 2 I, K] and [E, K, I]; plain ones may be transposed. Experts without a `down` compute nothing."""
        super().__init__()
        self.is_transposed = is_transposed
        self.baton_kind = kind
        self.act_fn = activation
        self.num_stacked: dict[str, int] = {}
        """How many experts each parameter of the model has, by name."""
        held: dict[str, Sequence[Sequence[StoredWeight]]] = {}
        for name, weights in (("gate_up_proj", gate_up), ("down_proj", down)):
            self.num_stacked[name] = len(weights)
            if isinstance(weights, ExpertsOnFile):
                held[name] = weights.experts[: len(down)]
            else:
                setattr(self, name, nn.Parameter(weights.detach()[: len(down)], requires_grad=False))
        hold_experts(self, held)

    def _apply_gate(self, rows: torch.Tensor) -> torch.Tensor:
        gate, up = rows.chunk(2, dim=-1)
        active: torch.Tensor = self.act_fn(gate) * up
        return active

    def computed(self, number: int, x: torch.Tensor) -> torch.Tensor:
        """What an expert computes of rows x [T, K], by torch, before the weights are packed."""
        up, down = (self._weight(name, number) for name in ("gate_up_proj", "down_proj"))
        return functional.linear(self._apply_gate(functional.linear(x, up)), down)

    def _weight(self, name: str, number: int) -> Any:
        if (held := held_experts(self).get(name)) is not None:
            return ExpertsOnFile(held)[number]
        weight = getattr(self, name)[number]
        return weight.T if self.is_transposed else weight


class Recognised(NamedTuple):
    """Experts that are known to compute what `experts` stands for."""

    experts: StackedExperts
    call: Call


def stacked_weights(part: Any, name: str) -> nn.Parameter | ExpertsOnFile | None:
    """The weights [E, ..] of experts that a part has in an attribute; None if it has none there.

    Those in their files are found in `experts_on_file`.
    """
    weights = getattr(part, name, None)
    is_stacked = isinstance(weights, ExpertsOnFile) or (isinstance(weights, nn.Parameter) and weights.ndim == 3)
    return weights if is_stacked else None


def stacked_experts_of(part: Any, generator: torch.Generator, like: torch.Tensor) -> Recognised | None:
    """What stands for a module of stacked experts; None for any other, or one that computes something else.

    `like`: in the dtype and on the device of rows.
    """
    up, down = (stacked_weights(part, name) for name in ("gate_up_proj", "down_proj"))
    if is_experts(part) or up is None or down is None or not callable(getattr(part, "act_fn", None)):
        return None
    if any(own is not up and own is not down for own in (*part.parameters(), *part.buffers())):
        return None
    for is_transposed in (True, False):
        (total, outputs, width), (count, *last) = (_natural(weights, is_transposed) for weights in (up, down))
        if [2 * last[1], last[0]] == [outputs, width] and total >= count:
            break
    else:
        return None
    call: Call = "chosen" if len(inspect.signature(part.forward).parameters) > 1 else "all"
    kind = ExpertKind(weighs_inputs=call == "all", passes_rest=call == "chosen" and total > count)
    found = StackedExperts(part.act_fn, up, down, is_transposed=is_transposed, kind=kind)
    x = small_and_large_rows(width, generator)[0].to(like)
    outs = [found.computed(number, x) for number in range(count)] + [x] * (total - count)
    try:
        if call == "all":
            given = part(x.repeat(total, 1)).view(total, *x.shape)
            alike = total == count and agree_in_parts(torch.stack(outs, dim=1), given.transpose(0, 1))
        else:
            experts = torch.arange(total, device=x.device).repeat(len(x), 1)
            weights = torch.rand(len(x), total, dtype=torch.float32, generator=generator).to(x.device)
            terms = (out.float() * weights[:, number : number + 1] for number, out in enumerate(outs))
            alike = agree_in_parts(torch.stack([*terms]).sum(0).to(x.dtype), part(x, experts, weights))
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError):
        return None
    return Recognised(found, call) if alike else None


def _natural(weights: nn.Parameter | ExpertsOnFile, is_transposed: bool) -> tuple[int, int, int]:
    """E, N and K of weights, of which plain ones may be transposed; those in their files never are."""
    count, outputs, inputs = weights.shape
    return (count, inputs, outputs) if is_transposed and isinstance(weights, nn.Parameter) else (count, outputs, inputs)


class Echo(nn.Module):
    """Stands for experts while their mixture is called: remembers what they are given, and gives random rows."""

    def __init__(self, call: Call, num_experts: int, x: torch.Tensor, generator: torch.Generator) -> None:
        """`x`: the mixture's rows [T, K]."""
        super().__init__()
        self.given: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        """The rows [T, K], and the chosen experts and their weights, each [T, most]."""
        self.gave: list[torch.Tensor] = []
        """The sums of all experts' rows [T, K]."""
        self._call, self._num_experts, self._x, self._generator = call, num_experts, x, generator

    def forward(self, rows: torch.Tensor, *choice: torch.Tensor) -> torch.Tensor:
        out = torch.randn(rows.shape, dtype=torch.float32, generator=self._generator).to(rows)
        if self._call == "chosen":
            chosen, weights = choice
            self.given.append((rows, chosen, weights))
            self.gave.append(out)
            return out
        rows = rows.view(self._num_experts, *self._x.shape)
        of_experts = ((rows.float() * self._x.float()).sum(-1) / self._x.float().square().sum(-1)).T
        most = int((of_experts != 0).sum(1).max())
        weights, chosen = of_experts.topk(most, dim=1)
        if agree(self._x * of_experts.T[..., None].to(self._x), rows):
            self.given.append((self._x, chosen, weights.to(self._x)))
            self.gave.append(out.view(rows.shape).sum(0))
        return out
