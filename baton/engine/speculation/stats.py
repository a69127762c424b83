"""What became of drafts, since start. The metrics have vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated

from baton.metric import Metric
from baton.values import value


@value(frozen=True, slots=True)
class SpecDecodingStats:
    """Totals over all steps of what `ComputedStep` says of one: the drafts that were verified."""

    num_drafts: Annotated[int, Metric("spec_decode_num_drafts_total", "Drafts that were verified.")] = 0
    num_draft_tokens: Annotated[int, Metric("spec_decode_num_draft_tokens_total", "Tokens of these drafts.")] = 0
    num_accepted_tokens: Annotated[
        int, Metric("spec_decode_num_accepted_tokens_total", "Tokens of drafts that were right.")
    ] = 0
    num_accepted_tokens_per_pos: Annotated[
        Mapping[int, int],
        Metric(
            "spec_decode_num_accepted_tokens_per_pos_total",
            "Tokens of drafts that were right, by position in the draft.",
            label="position",
            keys=(0,),
        ),
    ] = field(default_factory=dict)
    """By position in the draft, counted from 0."""

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens that a step with a draft yielded on average, the one without a draft included; 0 without drafts."""
        return 1.0 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 0.0


class SpecDecodingCounts:
    """The running counts from which `SpecDecodingStats` are made."""

    def __init__(self) -> None:
        self._num_drafts = 0
        self._num_draft_tokens = 0
        self._accepted: list[int] = []
        """Right tokens by position."""

    def note(self, num_drafted: int, num_right: int) -> None:
        """Count a verified draft."""
        self._num_drafts += 1
        self._num_draft_tokens += num_drafted
        self._accepted += [0] * (num_right - len(self._accepted))
        for position in range(num_right):
            self._accepted[position] += 1

    def stats(self) -> SpecDecodingStats:
        """The present counts as a value."""
        return SpecDecodingStats(
            self._num_drafts, self._num_draft_tokens, sum(self._accepted), dict(enumerate(self._accepted))
        )
