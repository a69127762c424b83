"""One sequence of a flight: its tokens, merged from several legs and attempts in the order of their indices."""

from __future__ import annotations

from collections.abc import Sequence

from baton.errors import StreamDiverged
from baton.messages.logprob_rows import joined_logprobs
from baton.messages.node import FINISH_REASONS, Outcome, RequestDelta
from baton.messages.sampling import TokenLogprobs
from baton.messages.speculation import NO_DRAFTS, DraftCounts
from baton.values import value
from router.flight.flight_table import EmitTokens


@value(frozen=True, slots=True)
class TokenRun:
    """Tokens that follow the output so far without a gap."""

    first_index: int
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs]


class OutputMerge:
    """Merges the tokens of one sequence. Each index is given out once, in order; a token that comes again is compared.

    A token is a function of the request alone, so a later attempt must repeat the tokens of the earlier ones. One that
    does not is an error, and its tokens are never mixed in.
    """

    def __init__(self, *, is_held: bool = False) -> None:
        """`is_held`: no token is given out before `take_held`, as if there were a gap before all."""
        self._is_held = is_held
        self.token_ids: list[int] = []
        """The output so far, without a gap."""
        self._early: dict[int, tuple[int, Sequence[TokenLogprobs]]] = {}
        """Tokens behind a gap, by index, each with its log-probabilities or none."""

    def begin_attempt(self) -> None:
        """Forget tokens behind a gap: the next attempt sends them again."""
        self._early.clear()

    def append(self, first_index: int, token_ids: Sequence[int]) -> bool:
        """Take tokens that continue the output while it has no gap, and return True; False: nothing was taken.

        Nearly all tokens come so, and this costs a tenth of `add`.
        """
        if first_index != len(self.token_ids) or self._early or self._is_held:
            return False
        self.token_ids.extend(token_ids)
        return True

    def add(self, first_index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> TokenRun | None:
        """Take any tokens of a leg; returns those that now continue the output without a gap, if any.

        Raises StreamDiverged when a token differs from the known one of its index.
        """
        for offset, token in enumerate(token_ids):
            index = first_index + offset
            known = self._known(index)
            if known is None:
                self._early[index] = (token, logprobs[offset : offset + 1])
            elif known != token:
                raise StreamDiverged(f"token {index} came back as {token} after {known} had been computed before")
        return self._close_gap()

    def take_held(self) -> TokenRun | None:
        """Hold back nothing from now on; returns the tokens that were held back, if any."""
        self._is_held = False
        return self._close_gap()

    def _known(self, index: int) -> int | None:
        if index < len(self.token_ids):
            return self.token_ids[index]
        early = self._early.get(index)
        return None if early is None else early[0]

    def _close_gap(self) -> TokenRun | None:
        if self._is_held:
            return None
        first = len(self.token_ids)
        logprobs: list[Sequence[TokenLogprobs]] = []
        while (entry := self._early.pop(len(self.token_ids), None)) is not None:
            self.token_ids.append(entry[0])
            logprobs.append(entry[1])
        if len(self.token_ids) == first:
            return None
        return TokenRun(first, tuple(self.token_ids[first:]), joined_logprobs(logprobs))


@value(frozen=True, slots=True)
class SequenceEnd:
    """The end of the output, as a node reported it; it may come before the last tokens do."""

    num_tokens: int
    outcome: Outcome
    stop_token_id: int | None


class FlightSequence:
    """Collects the tokens of one sequence over all attempts. A closed sequence takes no tokens any more."""

    def __init__(self, index: int, *, is_held: bool = False) -> None:
        """`is_held`: no token is given to the client before `take_held`."""
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

    def take_held(self) -> EmitTokens | None:
        """Hold back no tokens from now on; returns those that can be given to the client now."""
        return self._emitted(self._merge.take_held())

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
