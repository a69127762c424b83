"""How many attempts of a flight may fail before the flight is given up; see rule 5 of `router.flight.flight`."""

from __future__ import annotations

from typing import Final

MAX_FAILURES: Final = 3
"""The failed attempt with this number is the last attempt."""
MAX_REFUSALS: Final = 8
"""The most attempts that nodes refuse, or that are lost with a node which had not acknowledged them."""
MAX_UNRELATED_LOSSES: Final = 64
"""The most attempts that are lost together with nodes which the flight never used."""
REFILL_TOKENS: Final = 256
"""New tokens at the client since the last failure after which the earlier failures are forgotten. A request whose
every attempt kills its node ends if the attempts bring fewer than that; a stream that outlives nodes hours apart brings
thousands."""


class AttemptBudget:
    """Counts a flight's attempts that failed.

    Each `charge_…` returns why no further attempt may be made, or an empty text. `num_tokens` is how many tokens the
    client has by then.
    """

    def __init__(self) -> None:
        self.excluded: set[str] = set()
        """Incarnations on which an attempt failed since the budget was refilled: the next attempts avoid them."""
        self._num_failures = 0
        self._num_refusals = 0
        self._num_unrelated_losses = 0
        self._tokens_at_failure = 0
        """How many tokens the client had when an attempt failed last."""

    def charge_failure(self, num_tokens: int) -> str:
        """Charge an attempt that its node had acknowledged."""
        self._refill(num_tokens)
        self._num_failures += 1
        return f"{self._num_failures} attempts failed" if self._num_failures >= MAX_FAILURES else ""

    def charge_refusal(self, num_tokens: int) -> str:
        """Charge an attempt that its node refused or never acknowledged."""
        self._refill(num_tokens)
        self._num_refusals += 1
        return f"taken by none of {self._num_refusals} nodes" if self._num_refusals > MAX_REFUSALS else ""

    def charge_unrelated_loss(self, num_tokens: int) -> str:
        """Charge an attempt whose node was lost together with nodes that the flight never used."""
        self._refill(num_tokens)
        self._num_unrelated_losses += 1
        is_spent = self._num_unrelated_losses > MAX_UNRELATED_LOSSES
        return f"{self._num_unrelated_losses} attempts were lost with many nodes" if is_spent else ""

    def _refill(self, num_tokens: int) -> None:
        """Forget earlier failures if the client got enough tokens since the last one."""
        if num_tokens - self._tokens_at_failure >= REFILL_TOKENS:
            self._num_failures = self._num_refusals = self._num_unrelated_losses = 0
            self.excluded.clear()
        self._tokens_at_failure = num_tokens
