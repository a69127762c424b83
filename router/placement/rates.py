"""Learns how fast a node, or a fleet, computes and reads KV, from steps and transfers. Pure.

A step takes about

    step + token * prompt tokens computed + sequence * rows decoded + context * tokens behind those

milliseconds. A sequence that decodes has one row, and one more for each drafted token; from a step it gets one token,
and one more for each of these that was right. Both are learnt as averages for each sequence: a step of a node that
drafts takes longer and yields more. Without drafts they are exactly 1. The four rates are fitted by least squares over
a node's steps, with these rules:

1. The relative error counts: a decode step of 5 ms says as much as a chunk of 500 ms.
2. The weight of a step decays exponentially, so it is soon known that a node has become slower.
3. A step that is far off (of a process that was stopped meanwhile, say) weighs little: Huber's weights.
4. Each fit is regularised, weakly, towards the one before: a rate about which a node's latest steps say nothing stays
   as it was. The first fit of a node is regularised towards the rates of nodes like it (`fleet_rates`), and that of
   all of them towards a guess.
5. No rate is negative.

There is no term for the square of a prompt's length, since a step's report does not have the context of its chunks. The
later chunks of a long prompt are slower than its first ones, so a node's token rate is that of the prompts it gets.
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
"""The factor of a step's weight with each later step."""
AT_ONCE = 64
"""Number of steps that are fitted together."""
_HOLD = 0.5
"""The weight of the fit before, in steps."""
_HOLD_SEQUENCES = 16.0
"""The weight of the rows and tokens of a sequence that are assumed of a new node, in sequences of steps."""
_AGES = _DECAY ** np.arange(AT_ONCE - 1, -1, -1)
"""The weights of steps that are fitted together; for fewer steps, the last of these weights."""
_HUBER = 3.0
"""A step whose error is larger than so many mean relative errors weighs less."""
_CHANGED = 2.0
"""If steps take so many times as long as predicted, or as short, the node has changed."""
_KEPT_OF_BEFORE = 0.02
"""The factor of the weight of all earlier steps of a node that has changed."""
_TRANSFERS = 32
"""Number of latest transfers that count."""
_GUESSED_MS_PER_BYTE = 1e-6
"""1 GB/s."""
_PRIOR_BYTES = 4 << 20
"""The guess weighs as much as a transfer of so many bytes."""
_FIRST, _SECOND, _THIRD = itemgetter(0), itemgetter(1), itemgetter(2)

Floats = npt.NDArray[np.float64]


@value(frozen=True, slots=True)
class StepRates:
    """The rates of one node, in milliseconds for each part of a step."""

    step_ms: float
    token_ms: float
    sequence_ms: float
    """For each row of a sequence that decodes."""
    context_ms: float
    rows: float = 1.0
    """Rows of each sequence that decodes: its last token, and the drafts behind it."""
    tokens: float = 1.0
    """Tokens that each sequence that decodes gets from a step."""

    def overhead_ms(self, sequences: float, context_tokens: float) -> float:
        """The duration of a step without prompt tokens."""
        return self.step_ms + self.sequence_ms * self.rows * sequences + self.context_ms * context_tokens


GUESS = StepRates(step_ms=5.0, token_ms=0.1, sequence_ms=0.5, context_ms=1e-4)
"""The rates before any node has computed anything."""
_LEAST = np.array([1e-2, 1e-4, 1e-3, 1e-8])
"""Lower bounds of the rates in the regularisation, so that a rate near 0 can grow again."""


class StepLearner:
    """Learns the rates of one node, or of the fleet."""

    def __init__(self, prior: StepRates = GUESS) -> None:
        self.num_steps = 0
        self.num_prompt_steps = 0
        """Number of steps that computed prompt tokens."""
        self.num_decode_steps = 0
        """Number of steps that computed rows of sequences that decode."""
        self._fitted = prior
        """The rates of the last fit."""
        self._new: list[tuple[float, float, float, float, float]] = []
        self._moments: Floats = np.zeros((4, 4))
        self._products: Floats = np.zeros(4)
        self._error = 0.2
        """The mean relative error of the latest steps."""
        self._sequences = _HOLD_SEQUENCES
        self._drafted = (prior.rows - 1.0) * _HOLD_SEQUENCES
        self._accepted = (prior.tokens - 1.0) * _HOLD_SEQUENCES
        """The sequences that decoded, their drafted tokens, and those that were right; older steps weigh less."""

    def observe(self, step: StepFigures) -> None:
        """Take a step of the node."""
        if not 0.0 < step.step_ms < math.inf:
            return
        self.num_steps += 1
        self.num_prompt_steps += step.prefill_tokens > 0
        self.num_decode_steps += step.decode_rows > 0
        tokens, rows, context = step.prefill_tokens, step.decode_rows, step.decode_context_tokens
        self._new.append((step.step_ms, 1.0, float(tokens), float(rows), float(context)))
        if step.decode_sequences:
            self._sequences = self._sequences * _DECAY + step.decode_sequences
            self._drafted = self._drafted * _DECAY + step.draft_tokens
            self._accepted = self._accepted * _DECAY + min(step.accepted_tokens, step.draft_tokens)
        # A node's first steps are fitted soon. No placement waits for the fit, as it would if `rates` computed it.
        if len(self._new) >= AT_ONCE or (self.num_steps < AT_ONCE and 4 * len(self._new) >= self.num_steps):
            self._fit()

    @property
    def rates(self) -> StepRates:
        """The rates of the last fit."""
        return self._fitted

    def _fit(self) -> None:
        seen = np.array(self._new)
        self._new = []
        before = np.array([*_values(self._fitted)])
        # In units of the expected duration, so that no step weighs more than the others, however long it took.
        expected = np.maximum(seen[:, 1:] @ before, 1e-3)
        factor = _median(seen[:, 0] / expected)
        if not 1 / _CHANGED < factor < _CHANGED:
            # Most steps are far off: the node has changed, and its earlier steps say little.
            before, expected = before * factor, expected * factor
            self._moments, self._products = self._moments * _KEPT_OF_BEFORE, self._products * _KEPT_OF_BEFORE
        features, times = seen[:, 1:] / expected[:, np.newaxis], seen[:, 0] / expected
        ages, decay = _AGES[AT_ONCE - len(features) :], _DECAY ** len(features)
        errors = np.abs(times - 1.0)
        for _ in range(2):
            weights = ages * np.minimum(1.0, _HUBER * self._error / np.maximum(errors, 1e-9))
            moments = self._moments * decay + (features.T * weights) @ features
            products = self._products * decay + features.T @ (weights * times)
            rates = _solve(moments, products, before)
            errors = np.abs(times - features @ rates)
        self._moments, self._products = moments, products
        rows, tokens = 1.0 + self._drafted / self._sequences, 1.0 + self._accepted / self._sequences
        self._fitted = StepRates(*[*rates.tolist(), rows, tokens])
        self._error += 0.1 * (min(_median(errors) * 1.5, 1.0) - self._error)
        self._error = max(self._error, 0.02)


def _median(values: Floats) -> float:
    """The median; numpy's function costs ten times as much for so few values."""
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
        solution = np.linalg.solve(moments[np.ix_(positive, positive)], products[positive])
        if (solution >= 0).all():
            rates[positive] = solution
            break
        positive[np.flatnonzero(positive)[solution < 0]] = False
    return rates


class TransferLearner:
    """Learns how fast a node reads KV: from the last transfers without the slowest quarter."""

    def __init__(self, prior_ms_per_byte: float = _GUESSED_MS_PER_BYTE) -> None:
        prior = (prior_ms_per_byte, prior_ms_per_byte * _PRIOR_BYTES, _PRIOR_BYTES)
        self._last: deque[tuple[float, float, int]] = deque([prior], maxlen=_TRANSFERS)
        """Milliseconds per byte, milliseconds and bytes of each transfer."""
        self._ms_per_byte: float | None = prior_ms_per_byte
        """None: to be computed, since a transfer was added."""

    @property
    def ms_per_byte(self) -> float:
        if self._ms_per_byte is None:
            usual = sorted(self._last, key=_FIRST)[: (3 * len(self._last) + 3) // 4]
            self._ms_per_byte = sum(map(_SECOND, usual)) / sum(map(_THIRD, usual))
        return self._ms_per_byte

    def observe(self, timings: StageTimings) -> None:
        """Take a transfer that ended."""
        if timings.kv_bytes <= 0 or not 0.0 < timings.transfer_ms < math.inf:
            return
        self._last.append((timings.transfer_ms / timings.kv_bytes, timings.transfer_ms, timings.kv_bytes))
        self._ms_per_byte = None
