"""One of a flight's sequences: its tokens from several legs and attempts, and how it ended."""

from __future__ import annotations

from collections.abc import Sequence

from baton.errors import StreamDiverged
from baton.messages.node import FINISH_REASONS, Outcome, RequestDelta
from baton.values import value
from router.flight.flight_table import EmitTokens
from router.flight.output_merge import OutputMerge


@value(frozen=True, slots=True)
class SequenceEnd:
    """What the node said of the output's end; it may be known before all tokens are."""

    num_tokens: int
    outcome: Outcome
    stop_token_id: int | None


class FlightSequence:
    """What came of it in all attempts, and how far the running attempt is. Once closed it takes nothing any more."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.is_closed = False
        """The client has all of it."""
        self.finish_reason = ""
        self.stop_reason: int | str | None = None
        self._merge = OutputMerge()
        self._num_attempt_tokens = 0
        self._end: SequenceEnd | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens given out so far."""
        return len(self._merge.token_ids)

    @property
    def token_ids(self) -> Sequence[int]:
        """Those given out so far; a view that grows."""
        return self._merge.token_ids

    @property
    def is_complete(self) -> bool:
        """All tokens up to the end that the running attempt named are out."""
        return self._end is not None and self.num_tokens >= self._end.num_tokens

    def begin_attempt(self, num_known: int = 0) -> None:
        """Everything comes again, but for so many tokens that the nodes were given."""
        self._merge.begin_attempt()
        self._num_attempt_tokens = num_known
        self._end = None

    def takes_next(self, delta: RequestDelta) -> bool:
        """Whether the delta's tokens simply follow: then they are out now. `take` is for all others."""
        if self.is_closed or self._end is not None or not self._merge.append(delta.first_index, delta.token_ids):
            return False
        self._num_attempt_tokens = len(self._merge.token_ids)
        return True

    def take(self, delta: RequestDelta) -> EmitTokens | None:
        """Take a delta of the running attempt; what became complete by it. Raises StreamDiverged."""
        run = None
        if delta.token_ids:
            run = self._merge.add(delta.first_index, delta.token_ids, delta.logprobs)
            self._num_attempt_tokens = max(self._num_attempt_tokens, delta.first_index + len(delta.token_ids))
        if delta.outcome in FINISH_REASONS:
            num_tokens = max(self._num_attempt_tokens, delta.first_index)
            self._end = SequenceEnd(num_tokens, delta.outcome, delta.stop_token_id)
        if run is None:
            return None
        ends = self.is_complete and self._end is not None and self._end.stop_token_id is not None
        return EmitTokens(run.first_index, run.token_ids, run.logprobs, ends, self.index)

    def end_if_complete(self) -> SequenceEnd | None:
        """How its nodes say that it ended, once the client has all of it and does not know. Raises StreamDiverged when
        it has more than they say there is.
        """
        end = self._end
        if self.is_closed or end is None or not self.is_complete:
            return None
        if self.num_tokens > end.num_tokens:
            raise StreamDiverged(f"a later attempt ended after {end.num_tokens} tokens, {self.num_tokens} are out")
        return end

    def close(self, finish_reason: str, stop_reason: int | str | None) -> None:
        """It is over."""
        self.is_closed = True
        self.finish_reason, self.stop_reason = finish_reason, stop_reason
