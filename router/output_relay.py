"""Gives clients the tokens of their requests, and notices readers that are too slow.

A reader may leave some tokens unread. A request whose reader leaves more for too long is ended, and so is one for whose
log-probabilities there is no memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.errors import BatonError, SlowReader
from baton.messages.generation import GenerateEvent
from baton.messages.node import RequestDelta
from baton.messages.sampling import TokenLogprobs
from router.admission.limits import DispatchLimits
from router.admission.logprob_budget import KEPT_TOKENS, LogprobBudget
from router.counters import DispatchCounters
from router.flight.active_request import ActiveRequest
from router.flight.flight_table import EmitTokens, GiveUp, StopStringFound


class OutputRelay:
    """Puts tokens into clients' queues. `push`, `push_next` and `stalled` return an event for the flight, if any."""

    def __init__(self, limits: DispatchLimits, counters: DispatchCounters, logprob_budget: LogprobBudget) -> None:
        self._limits = limits
        self._counters = counters
        self._logprob_budget = logprob_budget

    def push_next(self, active: ActiveRequest, delta: RequestDelta, now: float) -> GiveUp | StopStringFound | None:
        """Give the client the tokens of a delta that the flight has taken by `take_if_next`."""
        self._note_tokens(active, delta.sequence_index, now)
        if active.logprobs:
            self._keep_logprobs(active, delta.sequence_index, delta.logprobs)
        return self._put(active, active.answer.push_next(delta), delta.sequence_index)

    def push(self, active: ActiveRequest, tokens: EmitTokens, now: float) -> GiveUp | StopStringFound | None:
        """Give the client tokens of its flight."""
        self._note_tokens(active, tokens.sequence_index, now)
        active.note_first_token(now)
        if active.logprobs:
            self._keep_logprobs(active, tokens.sequence_index, tokens.logprobs)
        return self._put(active, active.answer.push(tokens), tokens.sequence_index)

    def is_behind(self, active: ActiveRequest) -> bool:
        """Whether the reader has left more tokens unread than it may; it may leave as many of each sequence."""
        most, unread = self._limits.max_backlog_tokens, active.queue.backlog
        return unread > most and unread > most * active.request.sampling_params.n

    def stop_stall_timer_if_read(self, active: ActiveRequest) -> None:
        """Stop the timer of a slow reader if the reader has caught up."""
        if active.stall_timer is not None and not self.is_behind(active):
            active.stall_timer.cancel()
            active.stall_timer = None

    def stalled(self, active: ActiveRequest) -> GiveUp | None:
        """The timer of a slow reader is over: the request's end, unless the reader has caught up."""
        self.stop_stall_timer_if_read(active)
        if active.stall_timer is None:
            return None
        unread = active.queue.backlog
        return GiveUp(SlowReader(f"{unread} tokens were left unread for {self._limits.stall_s:g} s"))

    def _note_tokens(self, active: ActiveRequest, sequence_index: int, now: float) -> None:
        """Note when tokens of this sequence came."""
        before, active.last_tokens_at[sequence_index] = active.last_tokens_at[sequence_index], now
        if before:
            self._counters.served.gaps.observe(now - before)

    def _keep_logprobs(self, active: ActiveRequest, sequence_index: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """Keep the log-probabilities of the next tokens for a client that comes back, and those before them."""
        kept = active.logprobs[sequence_index]
        kept.append(logprobs)
        kept.forget_before_last(KEPT_TOKENS)

    def _put(
        self, active: ActiveRequest, events: Sequence[GenerateEvent], sequence_index: int
    ) -> GiveUp | StopStringFound | None:
        active.queue.put_all(events)
        if active.stall_timer is not None:
            self.stop_stall_timer_if_read(active)
        if active.may_reserve_more and (error := self._no_logprob_memory(active)) is not None:
            return GiveUp(error)
        stop_string = active.answer.stop_string_found(sequence_index) if active.answer.has_stop_strings else None
        return None if stop_string is None else StopStringFound(stop_string, sequence_index)

    def _no_logprob_memory(self, active: ActiveRequest) -> BatonError | None:
        """The error of a request for whose log-probabilities no memory is left; None: there is enough."""
        reservation, unread = active.reservation, active.queue.backlog
        if unread <= reservation.num_covered and not reservation.keeps_all:
            return None
        count = active.flight.num_output_tokens
        if not reservation.keeps_all:
            # What was queued anew for a client that came back is reserved as what is kept for it; it is read first.
            count = min(unread, count - active.num_replayed)
        if self._logprob_budget.covers(reservation, count):
            return None
        if reservation.keeps_all:
            return self._logprob_budget.full(reservation)
        return SlowReader(
            f"{unread} tokens with log-probabilities were left unread, and no memory is left for more "
            "(--logprob-memory): read faster, or ask for fewer alternatives"
        )
