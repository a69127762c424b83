"""What one more row costs a step, from the durations of the steps before."""

from __future__ import annotations

from typing import NamedTuple

_MEMORY = 0.98
"""The weight of a step against that of the next one."""
_ASSUMED_SHARE = 0.03
"""What a row adds to a step of one row, as a share of its duration, until steps of different sizes have been seen."""
_LEAST_SPREAD = 0.5
"""The least variance of the numbers of rows from which the cost of a row is derived."""


class Prices(NamedTuple):
    """What a drafted token costs, as a share of what a sampled token is worth; from 1 on it does not pay."""

    row: float
    """The price of a row of the step that verifies it."""
    model: float
    """The price of a token of the draft model: that of a row, and a share of a round."""


class FadingMean:
    """The mean of some numbers, in which older ones fade."""

    def __init__(self) -> None:
        self._weight = 0.0
        self.mean = 0.0
        """0 before the first number."""

    def add(self, number: float) -> None:
        """Note a number."""
        self._weight = self._weight * _MEMORY + 1.0
        self.mean += (number - self.mean) / self._weight


class StepCost:
    """Fits seconds = fixed + rows * each to the latest steps that only decode (least squares, older ones fade)."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._rows = 0.0
        self._seconds = 0.0
        """Weighted means."""
        self._variance = 0.0
        self._covariance = 0.0
        """Weighted sums of squares and products about the means."""

    def add(self, num_rows: int, seconds: float) -> None:
        """Note a step that computed `num_rows` tokens of decoding sequences."""
        self._weight = self._weight * _MEMORY + 1.0
        off_rows, off_seconds = num_rows - self._rows, seconds - self._seconds
        self._rows += off_rows / self._weight
        self._seconds += off_seconds / self._weight
        self._variance = self._variance * _MEMORY + off_rows * (num_rows - self._rows)
        self._covariance = self._covariance * _MEMORY + off_rows * (seconds - self._seconds)

    def price(self, num_sequences: int) -> float:
        """The cost of a row, as a share of what a step of `num_sequences` rows spends on each of its tokens.

        Above 0; from 1 on a draft costs more than the token that it may save.
        """
        if not self._weight or self._variance < _LEAST_SPREAD * self._weight:
            per_token = _ASSUMED_SHARE
            return num_sequences * per_token / (1.0 - per_token + num_sequences * per_token)
        per_token = max(0.0, self._covariance / self._variance)
        fixed = max(0.0, self._seconds - per_token * self._rows)
        total = fixed + num_sequences * per_token
        return num_sequences * per_token / total if total else 0.0

    @property
    def mean_seconds(self) -> float:
        """The mean duration of the latest steps; 0 before the first one."""
        return self._seconds
