"""How busy a load keeps the nodes of each role: a prediction from the rates that the router has learnt. Pure.

Prefill nodes are as busy as the time that prompts take them. For decode nodes the time per token follows from the load
by Little's law. With `r` requests a second on a node, each of `o` tokens and a mean context of `c`, there are
`b = r o t` streams, where `t` is the time of a step, and a step takes

    t = step + b (sequence + c context) = step / (1 - u),    u = r o (sequence + c context)

A decode node is as busy as the scarcest of three: its KV cache, its seats, and the time per token up to the target. Its
blocks are reserved before a stream begins, while the prompt waits and is computed elsewhere.

Requests come at random, and nodes have to do at a bad moment, too: see `_crowded`.
"""

from __future__ import annotations

import math

from baton.values import value
from router.placement.rates import StepRates
from router.planner.demand import OfferedLoad

USUAL_TARGET_MS = 2000.0
"""The time to the first token that is aimed at where there is no target."""
_LEAST_LEFT = 0.05
"""The least share of a step that is assumed to be left beside its streams: without it a step would take for ever."""
_LEAST_IDLE = 0.25
"""The least share of its time that a prefill node is assumed to be idle, by which prompts wait for each other."""
_SAFETY = 1.0
"""Standard deviations by which a bad moment is worse than the mean."""


@value(frozen=True, slots=True)
class Pressure:
    """How busy the nodes of each role are: 1 is all that they sustain."""

    prefill: float
    decode: float

    @property
    def worst(self) -> float:
        """That of the busier role."""
        return max(self.prefill, self.decode)


@value(frozen=True, slots=True)
class NodeCapacity:
    """What one usual node of a role has."""

    rates: StepRates
    chunk: int
    """The most tokens of prompts in a step."""
    kv_tokens: float
    """The tokens that its KV cache holds."""
    seats: float = math.inf
    """The sequences that it runs at once."""

    def prompt_s(self, tokens: float) -> float:
        """The seconds that it needs for a prompt."""
        return (math.ceil(tokens / self.chunk) * self.rates.step_ms + tokens * self.rates.token_ms) / 1e3

    def streams(self, load: OfferedLoad, num_nodes: int) -> tuple[float, float]:
        """The mean number of streams on each of so many nodes, and the milliseconds of a step with them."""
        rates = self.rates
        # Tokens of outputs a millisecond; a sequence gets `tokens` of them from a step, which computes its `rows`.
        per_ms = load.requests_per_s * load.output_tokens / rates.tokens / num_nodes / 1e3
        busy = per_ms * (rates.sequence_ms * rates.rows + load.context_tokens * rates.context_ms)
        step_ms = rates.step_ms / max(_LEAST_LEFT, 1.0 - busy)
        return per_ms * step_ms, step_ms


@value(frozen=True, slots=True)
class Capacity:
    """What one node of each role sustains."""

    prefill: NodeCapacity
    decode: NodeCapacity
    token_ms: float = math.inf
    """The target of the time per token."""
    first_token_ms: float = USUAL_TARGET_MS
    """Within this time prompts are to be computed."""

    @property
    def idle_pressure(self) -> float:
        """The pressure that is left with any number of nodes: a stream alone has its time per token, too."""
        return self.decode.rates.step_ms / self.decode.rates.tokens / self.token_ms

    def pressure(self, prompts: OfferedLoad, streams: OfferedLoad, num_prefill: int, num_decode: int) -> Pressure:
        """The pressure with so many nodes of each role.

        `prompts` and `streams`: the load on prefill and on decode nodes, which differ by what waits for either.
        """
        within_s, prompt_s = self.first_token_ms / 1e3, self.prefill.prompt_s(prompts.uncached_tokens)
        prefill = _crowded(prompts.requests_per_s * within_s) * prompt_s / (num_prefill * within_s)
        arriving = min(prompts.requests_per_s, streams.requests_per_s)
        idle = max(_LEAST_IDLE, 1.0 - arriving * prompt_s / num_prefill)
        return Pressure(prefill, self._of_decode(streams, num_decode, prompt_s / idle))

    def _of_decode(self, load: OfferedLoad, num_nodes: int, reserved_s: float) -> float:
        """`reserved_s`: for so long a prompt waits and is computed, while its blocks are reserved here."""
        node = self.decode
        mean, step_ms = node.streams(load, num_nodes)
        streams, arriving = (
            _crowded(num_nodes * count) / num_nodes for count in (mean, load.requests_per_s * reserved_s / num_nodes)
        )
        kv_tokens = streams * load.context_tokens + arriving * load.prompt_tokens
        token_ms = step_ms / node.rates.tokens
        return max(kv_tokens / node.kv_tokens, streams / node.seats, token_ms / self.token_ms)


def _crowded(mean: float) -> float:
    """The number that is there at a bad moment, of requests that come at random: the square-root rule of staffing.

    Their sizes are assumed to vary as much as those of an exponential distribution.
    """
    return mean + _SAFETY * math.sqrt(2.0 * mean)
