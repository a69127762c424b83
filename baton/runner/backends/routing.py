"""How a router of a mixture chooses the experts of each row, and what becomes of what they give: data about the model.

Scores are functions of a row's logits: softmax or sigmoid. The experts with the best scores are chosen, of equal ones
the first; a bias may count for the choice alone, and only experts of the best groups may be chosen (DeepSeek-V3, arXiv
2412.19437, section 2.1.2). Everything is computed in float32 and depends on the row alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn import functional

_COLUMNS = 64
"""torch computes multiples of so many numbers in one way."""
Scores = Literal["softmax", "sigmoid", "softmax_of_chosen", "softmax_of_near"]
"""In the last two the logits are the scores. The weights are the softmax of the chosen ones; or each is an expert's
share in the softmax of those that are near it, without those chosen before it (SparseMixer, arXiv 2409.12136)."""


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """A router behind its product."""

    num_experts: int
    most: int
    """How many experts a row has."""
    scores: Scores
    weights_dtype: torch.dtype
    """The weights are rounded to it."""
    choice_bias: torch.Tensor | None = None
    """float32 [num_experts], added to the scores for the choice alone."""
    groups: int = 1
    """Neighbouring experts are this many groups of one size."""
    most_groups: int = 1
    """From how many groups a row's experts are."""
    groups_by_two: bool = False
    """Whether a group counts as the sum of its two best scores, and not as its best one."""
    normalised: bool = False
    """Whether the weights are divided by the sum of them and `eps`."""
    eps: float = 0.0
    factor: float = 1.0
    """What the weights are multiplied with."""
    near: float = 0.0
    """For softmax_of_near, the largest (best - logit) / max(|logit|, best) of a logit that is near the best one."""
    expert_factors: torch.Tensor | None = None
    """float32 [num_experts]: what the weight of each expert is multiplied with at last."""

    def __post_init__(self) -> None:
        """Raises ValueError for numbers that don't fit."""
        if self.groups < 1 or self.num_experts % self.groups or not 1 <= self.most_groups <= self.groups:
            raise ValueError(
                f"{self.num_experts} experts can't be chosen from {self.most_groups} of {self.groups} groups"
            )
        if not 1 <= self.most <= self.num_experts // self.groups * self.most_groups:
            raise ValueError(f"{self.most} experts can't be chosen of {self.num_experts}")
        of_experts = {"bias of the choice": self.choice_bias, "factors of experts": self.expert_factors}
        for name, numbers in of_experts.items():
            if numbers is not None and (numbers.shape != (self.num_experts,) or numbers.dtype != torch.float32):
                raise ValueError(f"the {name} must be float32 [{self.num_experts}]")


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """The gate of gpt-oss's experts: (u + 1) * g * sigmoid(alpha * g) of neighbours g, at most the limit, and u."""

    limit: float
    alpha: float

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """What `Operations.clamped_gate` computes, by torch: rows [T, 2 N] to [T, N]."""
        wide = rows.float()
        gate, up = wide[:, ::2].clamp(max=self.limit), wide[:, 1::2].clamp(-self.limit, self.limit)
        padded = functional.pad(gate, (0, -gate.shape[1] % _COLUMNS))
        sigmoid = (padded * self.alpha).sigmoid()[:, : gate.shape[1]]
        return ((up + 1) * (gate * sigmoid)).to(rows.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class ExpertBiases:
    """What is added to the products of experts, of a dtype of rows, contiguous."""

    up: torch.Tensor
    """[experts, N]"""
    down: torch.Tensor
    """[experts, K]"""


@dataclass(frozen=True, slots=True)
class ExpertKind:
    """What the experts of a mixture do besides their products."""

    weighs_inputs: bool = False
    """Whether a row is multiplied with the expert's weight, and rounded, before the expert computes it; otherwise what
    the expert gives is."""
    passes_rest: bool = False
    """Whether chosen experts beyond those with products give their rows as they are; otherwise they give nothing."""


PLAIN_EXPERTS = ExpertKind()


@dataclass(frozen=True, slots=True, eq=False)
class SharedRows:
    """What is added to the sum of a row's experts."""

    rows: torch.Tensor
    """[T, K], or one row [1, K] that is added for all, such as a bias."""
    gate: torch.Tensor | None = None
    """[T, 1]: the rows are multiplied with its sigmoid before."""


def sum_of_experts(
    outs: torch.Tensor, places: torch.Tensor, weights: torch.Tensor, factor: float, shared: SharedRows | None
) -> torch.Tensor:
    """What `Operations.sum_experts` computes, by torch."""
    total = outs.new_zeros(places.shape[0], outs.shape[1], dtype=torch.float32)
    # One expert of each row at a time: together their products would be new memory, whose pages take longer to get than
    # to compute.
    for of_rank, weight in zip(places.long().T, weights.T, strict=True):
        total += outs[of_rank.clamp(min=0)].float() * weight.unsqueeze(-1) * (of_rank >= 0).unsqueeze(-1)
    out = total.to(outs.dtype)
    if factor != 1.0:
        out = out * factor
    if shared is None or shared.gate is None:
        return out if shared is None else out + shared.rows
    return out + shared.rows * shared.gate.expand(-1, _COLUMNS).sigmoid()[:, :1]


def _shares_of_near(logits: torch.Tensor, chosen: torch.Tensor, near: float) -> torch.Tensor:
    """The weights [T, most] of chosen experts, each in the softmax of those left that are near it."""
    shares, left = [], logits
    for place in range(chosen.shape[1]):
        expert = chosen[:, place : place + 1]
        best = logits.gather(1, expert)
        is_far = (best - logits) / torch.maximum(logits.abs(), best) > near
        shares.append(left.masked_fill(is_far, float("-inf")).softmax(-1).gather(1, expert))
        left = left.scatter(1, expert, float("-inf"))
    return torch.cat(shares, dim=-1)


def choose(logits: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """What `Operations.route` computes, by torch."""
    wide = logits.float()
    scores = wide.softmax(-1) if routing.scores == "softmax" else wide
    if routing.scores == "sigmoid":
        # torch rounds differently in the tail of a tensor: no row may be there.
        scores = functional.pad(wide, (0, -wide.shape[1] % _COLUMNS)).sigmoid()[:, : wide.shape[1]]
    for_choice = scores if routing.choice_bias is None else scores + routing.choice_bias
    if routing.groups > 1:
        grouped = for_choice.view(len(wide), routing.groups, -1)
        of_groups = grouped.topk(min(2, grouped.shape[2]) if routing.groups_by_two else 1, dim=-1).values.sum(-1)
        best = of_groups.sort(dim=-1, descending=True, stable=True).indices[:, : routing.most_groups]
        allowed = torch.zeros_like(of_groups, dtype=torch.bool).scatter_(1, best, True)
        for_choice = grouped.masked_fill(~allowed.unsqueeze(-1), float("-inf")).view(wide.shape)
    chosen = for_choice.sort(dim=-1, descending=True, stable=True).indices[:, : routing.most]
    if routing.scores == "softmax_of_near":
        weights = _shares_of_near(scores, chosen, routing.near)
    else:
        weights = scores.gather(1, chosen)
    if routing.scores == "softmax_of_chosen":
        weights = weights.softmax(-1)
    elif routing.normalised:
        weights = weights / (weights.sum(-1, keepdim=True) + routing.eps)
    weights = weights * routing.factor
    if routing.expert_factors is not None:
        weights = weights * routing.expert_factors[chosen]
    return chosen.int().contiguous(), weights.to(routing.weights_dtype).float()
