"""Beam search over one request, as pure decisions: from the likeliest tokens of each beam to the next beams.

The rules are those of transformers' `generate(num_beams=..., do_sample=False)`, so that the results are equal. A step
considers the best `num_candidates` continuations of all beams. Those that end the sequence are finished if they are
among the best `width`; of the others, the best `width` run on. A finished beam is scored by its log-probability divided
by its length to the power of `length_penalty`.

A beam is stored as one token and a link to the beam that it continues, so the cost of a step does not depend on length.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True, eq=False)
class Beam:
    """Output tokens and their score: the sum of their log-probabilities, length-penalised in a finished beam."""

    before: Beam | None = field(repr=False)
    """The beam that this one continues; None for the beam without tokens."""
    token_id: int
    """The last token."""
    score: float
    parent: int = 0
    """The index of `before` in `BeamSearch.running`."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens of the beam."""
        token_ids, beam = [], self
        while beam.before is not None:
            token_ids.append(beam.token_id)
            beam = beam.before
        return tuple(reversed(token_ids))


class BeamSearch:
    """One search. It is over at the maximum length, or when no running beam can beat the finished ones."""

    def __init__(
        self,
        width: int,
        stop_ids: Set[int],
        max_tokens: int,
        *,
        length_penalty: float = 1.0,
        early_stopping: bool = False,
    ) -> None:
        """`early_stopping`: the search is over as soon as `width` beams are finished."""
        self.running: Sequence[Beam] = (Beam(None, -1, 0.0),)
        """Beams that may be continued, best first."""
        self.length = 0
        """Tokens of each running beam."""
        self.finished: Sequence[Beam] = ()
        """Beams that have ended, best first."""
        self.is_over = False
        self._width = width
        self._stop_ids = stop_ids
        self._max_tokens = max_tokens
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping

    @property
    def num_candidates(self) -> int:
        """How many of each beam's likeliest tokens a step needs: enough to continue even if all stop tokens are among
        them."""
        return max(2, 1 + len(self._stop_ids)) * self._width

    def advance(self, continuations: Sequence[Sequence[tuple[int, float]]]) -> None:
        """Advance by one step.

        `continuations`: (token id, log-probability) of the likeliest tokens of each running beam, best first.
        """
        candidates = [
            Beam(beam, token_id, beam.score + logprob, parent)
            for parent, (beam, likeliest) in enumerate(zip(self.running, continuations, strict=True))
            for token_id, logprob in likeliest
        ]
        candidates.sort(key=_score, reverse=True)
        del candidates[self.num_candidates :]
        self.length += 1
        ends = [self.length >= self._max_tokens or beam.token_id in self._stop_ids for beam in candidates]
        divisor = self.length**self._length_penalty
        ended = [
            replace(beam, score=beam.score / divisor)
            for beam, is_end in zip(candidates[: self._width], ends, strict=False)
            if is_end
        ]
        self.finished = sorted((*self.finished, *ended), key=_score, reverse=True)[: self._width]
        self.running = [beam for beam, is_end in zip(candidates, ends, strict=True) if not is_end][: self._width]
        self.is_over = not self.running or (self._is_full and not self._may_improve(divisor))

    @property
    def _is_full(self) -> bool:
        return len(self.finished) == self._width

    def _may_improve(self, divisor: float) -> bool:
        return not self._early_stopping and self.running[0].score / divisor > self.finished[-1].score


def _score(beam: Beam) -> float:
    return beam.score
