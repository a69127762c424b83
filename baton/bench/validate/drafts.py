"""The drafts of real nodes, as the simulator's parameters."""

from __future__ import annotations

from collections.abc import Iterable

from baton.bench.simulator.drafts import DraftTotals, SimulatedSpeculation
from baton.messages.node import StepFigures
from baton.messages.speculation import MAX_DRAFTS

_HALVINGS = 50
"""Halvings of an interval of shares, after which it is as narrow as a float."""


def observed_speculation(steps: Iterable[StepFigures]) -> SimulatedSpeculation | None:
    """Drafts as frequent, as long and as often right as in these steps on average; None: nothing was drafted.

    A real text repeats itself in places, and drafts adapt to it. The simulator only knows averages: all its drafts have
    the mean length, come with the mean frequency, and yield the mean number of tokens.
    """
    totals = DraftTotals()
    for step in steps:
        totals.add(DraftTotals(step.decode_sequences, step.drafts, step.draft_tokens, step.accepted_tokens))
    if not totals.num_drafts or not totals.num_decodes:
        return None
    length = min(MAX_DRAFTS, max(1, round(totals.num_draft_tokens / totals.num_drafts)))
    share = share_of(totals.num_accepted_tokens / totals.num_drafts, length)
    coverage = min(1.0, totals.num_drafts / totals.num_decodes)
    return SimulatedSpeculation(share, length, coverage=coverage, adapts=False)


def share_of(num_accepted: float, length: int) -> float:
    """The share of right tokens with which a draft of this length yields so many on average: share + share^2 + …."""
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if sum(middle**place for place in range(1, length + 1)) < num_accepted:
            low = middle
        else:
            high = middle
    return (low + high) / 2
