"""How fast each node is, learnt from its steps while they happen. Pure.

A step takes about

    step + token * prompt tokens computed + sequence * sequences decoded + context * tokens behind those

milliseconds. The four rates are fitted by least squares over a node's steps, with these rules:

1. What counts is the relative error: a decode step of 5 ms says as much as a chunk of 500.
2. Steps are forgotten exponentially, so a node that slows down is known to.
3. A step far off (one that a stopped process took, or that computed nothing after all) weighs little: Huber's weights.
4. Each fit is held, weakly, to the one before: what a node's steps don't tell of late stays as it was. The first one is
   held to the fleet's, which all nodes' steps go into, and the fleet's to a guess. A node that has computed no prompts
   yet, as a decode node may, is taken to compute them as the fleet does.
5. No rate is negative.

There is no term for the square of a prompt: what a chunk attends to is not among the figures of a step. A long prompt's
later chunks are slower than its first ones, and so each node's token rate is that of the prompts that it gets.
"""

from __future__ import annotations

import math
from collections import deque
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from baton.messages.node import StageTimings, StepFigures
from baton.values import value

_DECAY = 0.998
"""Of a step's weight with each later one."""
_AT_ONCE = 64
"""Steps that are fitted together."""
_FLEETS_SHARE = 8
"""One step of so many is enough for the fleet's rates."""
_HOLD = 0.5
"""How many steps the fit before weighs."""
_AGES = _DECAY ** np.arange(_AT_ONCE - 1, -1, -1)
"""Weights of steps that are fitted together; of fewer, the last ones."""
_HUBER = 3.0
"""Mean relative errors, beyond which a step counts less."""
_CHANGED = 2.0
_KEPT_OF_BEFORE = 0.02
_TRANSFERS = 32
_GUESSED_MS_PER_BYTE = 1e-6
"""1 GB/s."""
_PRIOR_BYTES = 4 << 20
"""The guess weighs as much as a transfer of so many."""
_HALF_LIFE_S = 5.0
"""Of what a node has shown, while it shows nothing."""
_AGES_PER_S = 4.0
"""It fades in steps, between which nothing has to be computed anew."""
_NEVER = 1 << 30
_FIRST, _SECOND, _THIRD = itemgetter(0), itemgetter(1), itemgetter(2)

Floats = npt.NDArray[np.float64]


@value(frozen=True, slots=True)
class StepRates:
    """Milliseconds of each part of a step."""

    step_ms: float
    token_ms: float
    sequence_ms: float
    context_ms: float

    def overhead_ms(self, sequences: float, context_tokens: float) -> float:
        """A step that computes nothing of any prompt."""
        return self.step_ms + self.sequence_ms * sequences + self.context_ms * context_tokens


GUESS = StepRates(step_ms=5.0, token_ms=0.1, sequence_ms=0.5, context_ms=1e-4)
"""Before anybody has computed anything."""
_LEAST = np.array([1e-2, 1e-4, 1e-3, 1e-8])
"""A rate this small may grow again."""


class StepLearner:
    """The rates of one node, or of the fleet."""

    def __init__(self, prior: StepRates = GUESS) -> None:
        self.num_steps = 0
        self.num_prompt_steps = 0
        """Of them, those that computed something of a prompt."""
        self._fitted = prior
        """As of the last fit."""
        self._new: list[tuple[float, float, float, float, float]] = []
        self._moments: Floats = np.zeros((4, 4))
        self._products: Floats = np.zeros(4)
        self._error = 0.2
        """Mean relative error of late."""

    def observe(self, step: StepFigures) -> None:
        """The node computed a step."""
        if not 0.0 < step.step_ms < math.inf:
            return
        self.num_steps += 1
        self.num_prompt_steps += step.prefill_tokens > 0
        tokens, sequences, context = step.prefill_tokens, step.decode_sequences, step.decode_context_tokens
        self._new.append((step.step_ms, 1.0, float(tokens), float(sequences), float(context)))
        # A node's first steps count soon. Nobody waits for the fit: a placement would, if it were made when asked for.
        if len(self._new) >= _AT_ONCE or (self.num_steps < _AT_ONCE and 4 * len(self._new) >= self.num_steps):
            self._fit()

    @property
    def rates(self) -> StepRates:
        """As of the last fit."""
        return self._fitted

    def _fit(self) -> None:
        seen = np.array(self._new)
        self._new = []
        before = np.array([*_values(self._fitted)])
        # In units of what was expected, so that no step has more to say than the others, however long it took.
        expected = np.maximum(seen[:, 1:] @ before, 1e-3)
        factor = _median(seen[:, 0] / expected)
        if not 1 / _CHANGED < factor < _CHANGED:
            # Most are far off: it is the node that has changed, and what it was tells little.
            before, expected = before * factor, expected * factor
            self._moments, self._products = self._moments * _KEPT_OF_BEFORE, self._products * _KEPT_OF_BEFORE
        rows, times = seen[:, 1:] / expected[:, np.newaxis], seen[:, 0] / expected
        ages, decay = _AGES[_AT_ONCE - len(rows) :], _DECAY ** len(rows)
        errors = np.abs(times - 1.0)
        for _ in range(2):
            weights = ages * np.minimum(1.0, _HUBER * self._error / np.maximum(errors, 1e-9))
            moments = self._moments * decay + (rows.T * weights) @ rows
            products = self._products * decay + rows.T @ (weights * times)
            rates = _solve(moments, products, before)
            errors = np.abs(times - rows @ rates)
        self._moments, self._products, self._fitted = moments, products, StepRates(*rates.tolist())
        self._error += 0.1 * (min(_median(errors) * 1.5, 1.0) - self._error)
        self._error = max(self._error, 0.02)


def _median(values: Floats) -> float:
    """numpy's own costs ten times as much for as few as these."""
    ordered, middle = np.sort(values), len(values) // 2
    return float(ordered[middle] if len(values) % 2 else (ordered[middle - 1] + ordered[middle]) / 2)


def _values(rates: StepRates) -> tuple[float, float, float, float]:
    return (rates.step_ms, rates.token_ms, rates.sequence_ms, rates.context_ms)


def _solve(moments: Floats, products: Floats, before: Floats) -> Floats:
    """The rates that fit best and are not negative."""
    hold = _HOLD / np.maximum(before, _LEAST) ** 2
    moments, products = moments + np.diag(hold), products + hold * before
    rates: Floats = np.asarray(np.linalg.solve(moments, products), np.float64)
    positive = rates >= 0
    if positive.all():
        return rates
    rates = np.zeros(4)
    while positive.any():
        found = np.linalg.solve(moments[np.ix_(positive, positive)], products[positive])
        if (found >= 0).all():
            rates[positive] = found
            break
        positive[np.flatnonzero(positive)[found < 0]] = False
    return rates


class TransferLearner:
    """How fast KV comes into one node: bytes and time of the last transfers, but for the slowest."""

    def __init__(self, prior_ms_per_byte: float = _GUESSED_MS_PER_BYTE) -> None:
        prior = (prior_ms_per_byte, prior_ms_per_byte * _PRIOR_BYTES, _PRIOR_BYTES)
        self._last: deque[tuple[float, float, int]] = deque([prior], maxlen=_TRANSFERS)
        """Milliseconds per byte, milliseconds and bytes of each."""
        self._ms_per_byte: float | None = prior_ms_per_byte
        """None: nobody has asked since the last transfer."""

    @property
    def ms_per_byte(self) -> float:
        if self._ms_per_byte is None:
            usual = sorted(self._last, key=_FIRST)[: (3 * len(self._last) + 3) // 4]
            self._ms_per_byte = sum(map(_SECOND, usual)) / sum(map(_THIRD, usual))
        return self._ms_per_byte

    def observe(self, timings: StageTimings) -> None:
        """A transfer ended. The first ones between two nodes take long, and small ones tell of other things."""
        if timings.kv_bytes <= 0 or not 0.0 < timings.transfer_ms < math.inf:
            return
        self._last.append((timings.transfer_ms / timings.kv_bytes, timings.transfer_ms, timings.kv_bytes))
        self._ms_per_byte = None


class _Node:
    """What one node has shown, and when it did so last."""

    def __init__(self, fleet: StepLearner) -> None:
        self.learner = StepLearner(fleet.rates)
        self.step_at = self.prompt_at = 0.0
        self._blended: tuple[StepRates, StepRates, int, int, StepRates] | None = None
        """Four things, and what was made of them."""

    def beside(self, fleet: StepRates, now: float) -> StepRates:
        """Its rates as far as it has shown them of late, and the fleet's."""
        learner = self.learner
        own, age = learner.rates, int((now - self.step_at) * _AGES_PER_S)
        prompt_age = int((now - self.prompt_at) * _AGES_PER_S) if learner.num_prompt_steps else _NEVER
        known = self._blended
        # Rates are new ones when anything of them is: nobody compares them by their values here.
        if known is None or known[0] is not own or known[1] is not fleet or known[2] != age or known[3] != prompt_age:
            fresh, prompts = _freshness(age / _AGES_PER_S), _freshness(prompt_age / _AGES_PER_S)
            blend = StepRates(
                step_ms=_between(fleet.step_ms, own.step_ms, fresh),
                token_ms=_between(fleet.token_ms, own.token_ms, prompts),
                sequence_ms=_between(fleet.sequence_ms, own.sequence_ms, fresh),
                context_ms=_between(fleet.context_ms, own.context_ms, fresh),
            )
            known = self._blended = (own, fleet, age, prompt_age, blend)
        return known[4]


class FleetRates:
    """All nodes' rates, by incarnation. Seconds on the caller's clock.

    Who looks slow gets no work and could never show that it is not. So what a node has shown counts less and less while
    it shows nothing: it is taken to be as fast as the others by and by, and gets another chance.
    """

    def __init__(self) -> None:
        self._num_steps = 0
        self._fleet = StepLearner()
        self._fleet_transfer = TransferLearner()
        self._nodes: dict[str, _Node] = {}
        self._transfers: dict[str, tuple[TransferLearner, float]] = {}

    def stepped(self, incarnation: str, step: StepFigures, now: float) -> None:
        """A node computed a step."""
        self._num_steps += 1
        if self._num_steps % _FLEETS_SHARE == 0 or self._num_steps < _AT_ONCE:
            self._fleet.observe(step)
        node = self._nodes.get(incarnation)
        if node is None:
            node = self._nodes[incarnation] = _Node(self._fleet)
        node.learner.observe(step)
        node.step_at = now
        if step.prefill_tokens:
            node.prompt_at = now

    def transferred(self, incarnation: str, timings: StageTimings, now: float) -> None:
        """A transfer into a node ended."""
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
        """A node's rates; the fleet's for what it has not done for long, or never."""
        node, fleet = self._nodes.get(incarnation), self._fleet.rates
        return fleet if node is None else node.beside(fleet, now)

    def ms_per_byte(self, incarnation: str, now: float) -> float:
        """Of transfers into a node."""
        fleet = self._fleet_transfer.ms_per_byte
        if incarnation not in self._transfers:
            return fleet
        learner, at = self._transfers[incarnation]
        return _between(fleet, learner.ms_per_byte, _freshness(now - at))


def _freshness(age_s: float) -> float:
    """How much of what was learnt so long ago still counts."""
    return float(0.5 ** (max(0.0, age_s) / _HALF_LIFE_S))


def _between(fleet: float, own: float, freshness: float) -> float:
    return fleet + (own - fleet) * freshness
