"""Which way of preempting costs less, by what copying and computing took so far."""

from __future__ import annotations

from dataclasses import dataclass

_WEIGHT = 0.2
"""Of the newest measurement in a running average."""


@dataclass(frozen=True, slots=True)
class PreemptionRates:
    """What an engine does in a second. The defaults stand until something was measured."""

    seconds_per_block: float = 1e-4
    """To copy a block one way."""
    seconds_per_token: float = 1e-3
    """To compute a token of a prompt."""

    def after_copies(self, num_blocks: int, seconds: float) -> PreemptionRates:
        """With one more measurement of copying."""
        return PreemptionRates(_mean(self.seconds_per_block, seconds / num_blocks), self.seconds_per_token)

    def after_compute(self, num_tokens: int, seconds: float) -> PreemptionRates:
        """With one more measurement of computing prompts."""
        return PreemptionRates(self.seconds_per_block, _mean(self.seconds_per_token, seconds / num_tokens))


def swap_is_cheaper(num_blocks: int, num_tokens: int, rates: PreemptionRates) -> bool:
    """Whether so many blocks are copied out and in again faster than their `num_tokens` tokens are computed again."""
    return 2 * num_blocks * rates.seconds_per_block < num_tokens * rates.seconds_per_token


def _mean(so_far: float, newest: float) -> float:
    return so_far + _WEIGHT * (newest - so_far)
