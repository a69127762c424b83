"""How many tokens were drafted for a request or a sequence, and how many of those were right."""

from __future__ import annotations

from baton.values import value


@value(frozen=True, slots=True)
class DraftCounts:
    """Counts of drafted tokens that were verified."""

    num_drafted: int = 0
    num_accepted: int = 0
    """The drafted tokens that are tokens of the output."""

    @property
    def num_rejected(self) -> int:
        """The drafted tokens that are not tokens of the output: they were wrong, or lie behind its end."""
        return self.num_drafted - self.num_accepted

    def __add__(self, other: DraftCounts) -> DraftCounts:
        return DraftCounts(self.num_drafted + other.num_drafted, self.num_accepted + other.num_accepted)


NO_DRAFTS = DraftCounts()
