"""The rates of all nodes: each node's own while they are fresh, and those of the whole fleet. Pure."""

from __future__ import annotations

from baton.messages.node import StageTimings, StepFigures
from router.placement.rates import AT_ONCE, StepLearner, StepRates, TransferLearner

_FLEETS_SHARE = 8
"""One in so many steps contributes to the fleet's rates."""
_HALF_LIFE_S = 5.0
"""The half-life of a node's own rates while it reports no steps."""
_AGES_PER_S = 4.0
"""Own rates fade in so many steps a second, between which nothing has to be computed again."""
_NEVER = 1 << 30


class _Node:
    """The rates of one node, and when it reported steps last."""

    def __init__(self, fleet: StepLearner) -> None:
        self.learner = StepLearner(fleet.rates)
        self.step_at = self.prompt_at = 0.0
        self._blended: tuple[StepRates, StepRates, int, int, StepRates] | None = None
        """The four inputs of `blended_with`, and its result for them."""

    def blended_with(self, fleet: StepRates, now: float) -> StepRates:
        """The node's own rates as far as they are fresh, blended with the fleet's."""
        learner = self.learner
        own, age = learner.rates, int((now - self.step_at) * _AGES_PER_S)
        prompt_age = int((now - self.prompt_at) * _AGES_PER_S) if learner.num_prompt_steps else _NEVER
        known = self._blended
        # A new fit is a new object, so identity is enough and cheaper than equality.
        if known is None or known[0] is not own or known[1] is not fleet or known[2] != age or known[3] != prompt_age:
            fresh, prompts = _freshness(age / _AGES_PER_S), _freshness(prompt_age / _AGES_PER_S)
            blend = StepRates(
                step_ms=_between(fleet.step_ms, own.step_ms, fresh),
                token_ms=_between(fleet.token_ms, own.token_ms, prompts),
                sequence_ms=_between(fleet.sequence_ms, own.sequence_ms, fresh),
                context_ms=_between(fleet.context_ms, own.context_ms, fresh),
                rows=_between(fleet.rows, own.rows, fresh),
                tokens=_between(fleet.tokens, own.tokens, fresh),
            )
            known = self._blended = (own, fleet, age, prompt_age, blend)
        return known[4]


class FleetRates:
    """The rates of all nodes, by incarnation. Seconds on the caller's clock.

    A node that looks slow gets no work, so it could never show that it has become faster. Therefore the rates of a node
    that reports no steps fade into those of the fleet, until it gets work again.
    """

    def __init__(self) -> None:
        self._num_steps = 0
        self._fleet = StepLearner()
        self._fleet_transfer = TransferLearner()
        self._nodes: dict[str, _Node] = {}
        self._transfers: dict[str, tuple[TransferLearner, float]] = {}

    def add_step(self, incarnation: str, step: StepFigures, now: float) -> None:
        """Take a step of a node."""
        self._num_steps += 1
        if self._num_steps % _FLEETS_SHARE == 0 or self._num_steps < AT_ONCE:
            self._fleet.observe(step)
        node = self._nodes.get(incarnation)
        if node is None:
            node = self._nodes[incarnation] = _Node(self._fleet)
        node.learner.observe(step)
        node.step_at = now
        if step.prefill_tokens:
            node.prompt_at = now

    def add_transfer(self, incarnation: str, timings: StageTimings, now: float) -> None:
        """Take a transfer into a node that ended."""
        self._fleet_transfer.observe(timings)
        learner, _ = self._transfers.get(incarnation, (None, 0.0))
        learner = learner or TransferLearner(self._fleet_transfer.ms_per_byte)
        learner.observe(timings)
        self._transfers[incarnation] = (learner, now)

    def forget(self, incarnation: str) -> None:
        """The node is gone."""
        self._nodes.pop(incarnation, None)
        self._transfers.pop(incarnation, None)

    def steps(self, incarnation: str, now: float) -> StepRates:
        """A node's rates; the fleet's for what it has not done for long, or has never done."""
        node, fleet = self._nodes.get(incarnation), self._fleet.rates
        return fleet if node is None else node.blended_with(fleet, now)

    def ms_per_byte(self, incarnation: str, now: float) -> float:
        """The time per byte of transfers into a node, in milliseconds."""
        fleet = self._fleet_transfer.ms_per_byte
        if incarnation not in self._transfers:
            return fleet
        learner, at = self._transfers[incarnation]
        return _between(fleet, learner.ms_per_byte, _freshness(now - at))


def _freshness(age_s: float) -> float:
    """The weight of rates that were learnt so long ago, 1 to 0."""
    return float(0.5 ** (max(0.0, age_s) / _HALF_LIFE_S))


def _between(fleet: float, own: float, freshness: float) -> float:
    return fleet + (own - fleet) * freshness
