"""The cheaper way to preempt a request, by measured costs of copying and of computing."""

from __future__ import annotations

from dataclasses import dataclass

_WEIGHT = 0.2
"""Weight of the newest measurement in the exponential moving averages."""


@dataclass(frozen=True, slots=True)
class PreemptionRates:
    """Measured costs of copying blocks and computing tokens. The defaults apply until there is a measurement."""

    seconds_per_block: float = 1e-4
    """Time to copy a block in one direction."""
    seconds_per_token: float = 1e-3
    """Time to compute one token of a prompt."""

    def after_copies(self, num_blocks: int, seconds: float) -> PreemptionRates:
        """These rates with one more measurement of copying."""
        return PreemptionRates(_mean(self.seconds_per_block, seconds / num_blocks), self.seconds_per_token)

    def after_compute(self, num_tokens: int, seconds: float) -> PreemptionRates:
        """These rates with one more measurement of computing prompts."""
        return PreemptionRates(self.seconds_per_block, _mean(self.seconds_per_token, seconds / num_tokens))


def swap_is_cheaper(num_blocks: int, num_tokens: int, rates: PreemptionRates) -> bool:
    """Whether copying `num_blocks` blocks out and back in is faster than recomputing their `num_tokens` tokens."""
    return 2 * num_blocks * rates.seconds_per_block < num_tokens * rates.seconds_per_token


def _mean(so_far: float, newest: float) -> float:
    return so_far + _WEIGHT * (newest - so_far)
