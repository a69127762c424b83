"""How far the logits of a quantised model may be from those of float64 with its dequantised weights, and why.

**Where the differences come from.** A product with a quantised weight rounds each row of its input x to 8 bits in
blocks of at most 32 elements (docs/decisions/0029): the step is max|x| / 127 of the block, so an element moves by at
most half a step, 1/254 of the block's largest element. A KV cache in 8 bits moves each key and value by at most half
the distance of two codes (docs/decisions/0026). All other differences are those of floating point, with the unit
roundoff u: n additions err by at most sqrt(n) u Σ|w x| (in the sense below), and what lies between two products (norm,
rotation, attention, activation, residual) by at most OTHERS u of the largest number of its row. A bfloat16 model also
rounds each output of a product to 8 significant bits, and at most OTHERS_NARROW times what lies between two products.

**What they do to a logit.** To first order a logit moves by Σ g e, where e are these errors and g the logit's gradient
with respect to the number that is moved, which automatic differentiation in float64 gives. Rounding errors of different
numbers are taken as independent with mean zero (Higham and Mary, "A New Approach to Probabilistic Rounding Error
Analysis", 2019). By Hoeffding's inequality, with |e| <= h,

    P(|Σ g e| > FACTOR sqrt(Σ (g h)²)) <= 2 exp(-FACTOR² / 2) = 1e-9.

**Two comparisons.** Without a recording, float64 rounds nothing, and h is half a step: this is the claim that users
care about. The bound is wide, since it allows every rounding to 8 bits. With a recording of the runner's inputs,
float64 adds the very rounding errors that the runner made: they follow from its inputs by the rule above, which is
written here once more. Only errors of floating point are left in h. The bound is a thousand times narrower, so that one
scale of one group that is 2 percent off shows in the logits of a whole model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from tests.support.float64_model import Float64Model

FACTOR = math.sqrt(2 * math.log(2 / 1e-9))
UNIT = 2.0**-24
OTHERS = 16
NARROW_UNIT = 2.0**-9
OTHERS_NARROW = 4
_LOGITS_AT_ONCE = 64


@dataclass(frozen=True)
class RunnerRoundings:
    """What a runner rounds: the inputs of quantised layers in blocks, numbers to bfloat16, and what it caches."""

    blocks: Mapping[str, int]
    """The number of neighbouring elements of x that share a step, for each layer whose weight is quantised."""
    is_narrow: bool = False
    """Whether the model is computed in bfloat16."""
    cache_dtype: torch.dtype | None = None
    """int8, float8_e4m3fn, or None: the cache does not round."""


@dataclass(frozen=True)
class RunnerRecording:
    """What a runner computed with in one step of a whole prompt."""

    inputs: Sequence[tuple[str | None, torch.Tensor]]
    """The inputs [rows, K] of its products, in their order, with the layer if that is one of an expert."""
    cached: Sequence[tuple[torch.Tensor, torch.Tensor]]
    """The keys and values [T, KH, D] of each layer, as its cache has them."""


@dataclass
class DisturbedModel:
    """A model in float64 whose numbers may move as far as a runner rounds them, or move as a runner has moved them."""

    model: Float64Model
    roundings: RunnerRoundings
    recording: RunnerRecording | None = None
    _moves: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Zeros that were added to numbers, and by how much each number may move."""

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """The logits of every position, float64 [T, vocabulary]; `bound` differentiates them."""
        self._inputs: Iterator[tuple[str | None, torch.Tensor]] = iter(self.recording.inputs if self.recording else ())
        self._moves.clear()
        return self.model.logits(token_ids, self._product, self._cache)

    def bound(self, logits: torch.Tensor) -> torch.Tensor:
        """The most by which these logits of the latest call, [N], may differ from the runner's: [N]."""
        squares = torch.zeros(len(logits), dtype=torch.float64)
        for first in range(0, len(logits), _LOGITS_AT_ONCE):
            some = slice(first, first + _LOGITS_AT_ONCE)
            gradients = torch.autograd.grad(
                logits,
                [zeros for zeros, _ in self._moves],
                torch.eye(len(logits), dtype=torch.float64)[some],
                retain_graph=True,
                is_grads_batched=True,
                allow_unused=True,
            )
            for gradient, (_, half) in zip(gradients, self._moves, strict=True):
                if gradient is not None:
                    squares[some] += (gradient * half).square().flatten(1).sum(dim=1)
        return FACTOR * squares.sqrt()

    def _moved(self, x: torch.Tensor, half: torch.Tensor) -> torch.Tensor:
        zeros = torch.zeros_like(x, requires_grad=True)
        self._moves.append((zeros, half.detach()))
        return x + zeros

    def _product(self, layers: Sequence[str], x: torch.Tensor) -> list[torch.Tensor]:
        # The runner may have padded the rows of an expert.
        seen = self._next_input(layers[0])[: len(x)].double() if self.recording else None
        largest = x.abs().amax(dim=1, keepdim=True).expand_as(x)
        x = self._moved(x, self._unit(OTHERS, OTHERS_NARROW) * largest)
        rounded: dict[int | None, torch.Tensor] = {None: x}
        outs = []
        for layer in layers:
            block, weight = self.roundings.blocks.get(layer), self.model.weight(layer)
            if block not in rounded and block is not None:
                rounded[block] = self._rounded(x, seen, block)
            row = rounded[block]
            out = row @ weight.T + self.model.bias(layer)
            if block is None:
                magnitude, additions = row.abs() @ weight.abs().T, weight.shape[1] + 1
            else:
                # The products scale * code and the offset of a weight are at most three times the largest of its group.
                widest = weight.view(len(weight), -1, block).abs().amax(dim=2).repeat_interleave(block, dim=1)
                magnitude, additions = 3 * row.abs() @ widest.T, 2 * weight.shape[1] // block + 1
            half = math.sqrt(additions) * UNIT * magnitude + self._unit(1, 1) * out.abs()
            outs.append(self._moved(out, half))
        return outs

    def _next_input(self, layer: str) -> torch.Tensor:
        """The runner's input of a layer. Experts that only padding reached are passed over."""
        return next(x for found, x in self._inputs if found in (None, layer))

    def _unit(self, wide: float, narrow: float) -> float:
        return wide * UNIT + (narrow * NARROW_UNIT if self.roundings.is_narrow else 0.0)

    def _rounded(self, x: torch.Tensor, seen: torch.Tensor | None, block: int) -> torch.Tensor:
        """x in 8 bits: with the errors of the runner's input, or free to move by half a step."""
        # Steps and codes are float32 by definition: in float64 a code at the middle of two could be the other one.
        given = x.detach() if seen is None else seen.float()
        step = (given.reshape(len(given), -1, block).abs().amax(dim=2) / 127).repeat_interleave(block, dim=1)
        if seen is None:
            return self._moved(x, step / 2)
        codes = torch.where(step > 0, (given / step).round(), torch.zeros_like(step))
        return x + (codes.double() * step.double() - seen)

    def _cache(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values in 8 bits: those of the runner, which must be near enough, or free to move as far."""
        if self.roundings.cache_dtype is None:
            return key, value
        halves = [_half_distance(rows.detach(), self.roundings.cache_dtype) for rows in (key, value)]
        if self.recording is None:
            return self._moved(key, halves[0]), self._moved(value, halves[1])
        cached = tuple(rows.double() for rows in self.recording.cached[layer])
        for exact, found, half in zip((key, value), cached, halves, strict=True):
            float_error = self._unit(4 * OTHERS, OTHERS_NARROW) * exact.abs().amax(dim=2, keepdim=True)
            assert bool(((found - exact).abs() <= half * (1 + 2.0**-7) + float_error).all()), f"cache of layer {layer}"
        return cached[0], cached[1]


def _half_distance(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Half the distance of the codes on both sides of each number [T, KH, D], whose scale is that of its D numbers."""
    largest = rows.abs().amax(dim=2, keepdim=True)
    if dtype == torch.int8:
        return (largest / 254).expand_as(rows)
    # e4m3: 3 bits behind the leading one, and below 2 ** -6 a distance of 2 ** -9.
    scale = largest / 448
    return torch.maximum(rows.abs() * 2.0**-4, scale * 2.0**-10)
