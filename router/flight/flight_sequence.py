"""One sequence of a flight: its tokens, merged from several legs and attempts, and how it ended."""

from __future__ import annotations

from collections.abc import Sequence

from baton.errors import StreamDiverged
from baton.messages.node import FINISH_REASONS, Outcome, RequestDelta
from baton.messages.speculation import NO_DRAFTS, DraftCounts
from baton.values import value
from router.flight.flight_table import EmitTokens
from router.flight.output_merge import OutputMerge, TokenRun


@value(frozen=True, slots=True)
class SequenceEnd:
    """The end of the output, as a node reported it; it may come before the last tokens do."""

    num_tokens: int
    outcome: Outcome
    stop_token_id: int | None


class FlightSequence:
    """Collects the tokens of one sequence over all attempts. A closed sequence takes no tokens any more."""

    def __init__(self, index: int, *, is_held: bool = False) -> None:
        """`is_held`: no token is given to the client before `release`."""
        self.index = index
        self.is_closed = False
        """Whether the client has the whole sequence."""
        self.finish_reason = ""
        self.stop_reason: int | str | None = None
        self._merge = OutputMerge(is_held=is_held)
        self._num_attempt_tokens = 0
        """How long the output is as far as the running attempt has sent it, the tokens that it was given included."""
        self._end: SequenceEnd | None = None
        self._drafts_before = NO_DRAFTS
        """The counts of the earlier attempts whose tokens the running one was given."""
        self._drafts = NO_DRAFTS
        """The counts of the running attempt."""

    @property
    def draft_counts(self) -> DraftCounts:
        """What became of the drafts of all attempts that the output is made of."""
        return self._drafts_before + self._drafts

    @property
    def num_tokens(self) -> int:
        """Number of tokens given to the client so far."""
        return len(self._merge.token_ids)

    @property
    def token_ids(self) -> Sequence[int]:
        """The tokens given to the client so far; a view that grows."""
        return self._merge.token_ids

    @property
    def is_complete(self) -> bool:
        """Whether all tokens up to the end that the running attempt reported were given to the client."""
        return self._end is not None and self.num_tokens >= self._end.num_tokens

    def begin_attempt(self, num_known: int = 0) -> None:
        """Expect all tokens again from a new attempt, without the first `num_known`, which its nodes were given."""
        self._merge.begin_attempt()
        self._num_attempt_tokens = num_known
        self._end = None
        # An attempt that is given no tokens computes, and drafts, all of them again.
        self._drafts_before = self.draft_counts if num_known else NO_DRAFTS
        self._drafts = NO_DRAFTS

    def take_if_next(self, delta: RequestDelta) -> bool:
        """Take a delta whose tokens continue the output, and return True. False: nothing is taken; see `take`."""
        if self.is_closed or self._end is not None or not self._merge.append(delta.first_index, delta.token_ids):
            return False
        self._num_attempt_tokens = len(self._merge.token_ids)
        if delta.draft_counts is not None:
            self._drafts = delta.draft_counts
        return True

    def take(self, delta: RequestDelta) -> EmitTokens | None:
        """Take a delta of the running attempt; returns the tokens that can be given to the client now.

        Raises StreamDiverged when a token differs from one that an earlier attempt gave for its index.
        """
        run = None
        if delta.token_ids:
            run = self._merge.add(delta.first_index, delta.token_ids, delta.logprobs)
            self._num_attempt_tokens = max(self._num_attempt_tokens, delta.first_index + len(delta.token_ids))
        if delta.draft_counts is not None:
            self._drafts = delta.draft_counts
        if delta.outcome in FINISH_REASONS:
            num_tokens = max(self._num_attempt_tokens, delta.first_index)
            self._end = SequenceEnd(num_tokens, delta.outcome, delta.stop_token_id)
        return self._emitted(run)

    def release(self) -> EmitTokens | None:
        """Hold back no tokens from now on; returns those that can be given to the client now."""
        return self._emitted(self._merge.release())

    def _emitted(self, run: TokenRun | None) -> EmitTokens | None:
        if run is None:
            return None
        ends = self.is_complete and self._end is not None and self._end.stop_token_id is not None
        return EmitTokens(run.first_index, run.token_ids, run.logprobs, ends, self.index)

    def end_if_complete(self) -> SequenceEnd | None:
        """The reported end of the output, once the client has all tokens before it; None until then, and when closed.

        Raises StreamDiverged when the client has more tokens than the running attempt has.
        """
        end = self._end
        if self.is_closed or end is None or not self.is_complete:
            return None
        if self.num_tokens > end.num_tokens:
            raise StreamDiverged(
                f"a later attempt ended after {end.num_tokens} tokens, the client has {self.num_tokens}"
            )
        return end

    def close(self, finish_reason: str, stop_reason: int | str | None) -> None:
        """End the sequence for the client."""
        self.is_closed = True
        self.finish_reason, self.stop_reason = finish_reason, stop_reason
