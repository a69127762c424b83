"""Knows which router owns each attempt and what the attempt has brought, so that one router can continue for another.

An attempt belongs to the router that submitted it until another router adopts it. When its router's stream ends, it
runs on as an orphan for a grace, in which any router may adopt it; that router, too, if only its link was cut. An
attempt that has ended is kept as long, because nobody knows whether its last report arrived. Pure: time is an argument,
and what the engine is to abort is returned.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field

from cachetools import FIFOCache

from baton.machine import Machine
from baton.messages.ids import AttemptKey
from baton.messages.logprob_rows import LogprobLog, LogprobRows
from baton.messages.node import Outcome, RequestDelta, StageTimings
from baton.messages.speculation import DraftCounts
from baton.node.attempts.attempt_times import AttemptClock

MAX_ENDED = 4096
"""The most attempts that have ended and are kept."""
MAX_ENDED_ENTRIES = 4_000_000
"""The most tokens and log-probabilities of them that are kept."""
MAX_FENCES = 4096
"""For so many forgotten attempts it is remembered which router adopted them, because a late abort by another router
must not withdraw blocks that are still read."""
_MAX_REPLAYED_TOKENS = 2048
"""The most tokens in one replayed delta; with 20 log-probabilities each, that is a message of half a megabyte."""
_OUTCOMES_WITH_TOKEN = frozenset({Outcome.STOP, Outcome.LENGTH, Outcome.HANDED_OFF})


class AttemptState(enum.Enum):
    """The states of an attempt on its node."""

    RUNNING = enum.auto()
    """It runs for a router that is attached."""
    ORPHANED = enum.auto()
    """It runs without a router, until one adopts it."""
    ENDED = enum.auto()
    """It ended while its router was attached. It is kept, since that router may be lost with the last report."""
    ENDED_ORPHANED = enum.auto()
    """It ended as an orphan. It is kept until a router adopts it."""
    FORGOTTEN = enum.auto()
    """Nothing is kept of it."""


class AttemptEvent(enum.Enum):
    """What can happen to an attempt."""

    DETACHED = enum.auto()
    """Its router's stream has ended."""
    ADOPTED = enum.auto()
    """A router has become its owner."""
    FINISHED = enum.auto()
    """The engine has ended all its sequences."""
    ABORTED = enum.auto()
    """Nobody wants it any more."""
    GRACE_OVER = enum.auto()
    """No router has adopted it in time."""


ATTEMPT_TABLE = {
    (AttemptState.RUNNING, AttemptEvent.ADOPTED): AttemptState.RUNNING,
    (AttemptState.RUNNING, AttemptEvent.DETACHED): AttemptState.ORPHANED,
    (AttemptState.RUNNING, AttemptEvent.FINISHED): AttemptState.ENDED,
    (AttemptState.RUNNING, AttemptEvent.ABORTED): AttemptState.FORGOTTEN,
    (AttemptState.ORPHANED, AttemptEvent.ADOPTED): AttemptState.RUNNING,
    (AttemptState.ORPHANED, AttemptEvent.FINISHED): AttemptState.ENDED_ORPHANED,
    (AttemptState.ORPHANED, AttemptEvent.ABORTED): AttemptState.FORGOTTEN,
    (AttemptState.ORPHANED, AttemptEvent.GRACE_OVER): AttemptState.FORGOTTEN,
    (AttemptState.ENDED, AttemptEvent.DETACHED): AttemptState.ENDED,
    (AttemptState.ENDED, AttemptEvent.ADOPTED): AttemptState.ENDED,
    (AttemptState.ENDED, AttemptEvent.ABORTED): AttemptState.FORGOTTEN,
    (AttemptState.ENDED, AttemptEvent.GRACE_OVER): AttemptState.FORGOTTEN,
    (AttemptState.ENDED_ORPHANED, AttemptEvent.ADOPTED): AttemptState.ENDED,
    (AttemptState.ENDED_ORPHANED, AttemptEvent.ABORTED): AttemptState.FORGOTTEN,
    (AttemptState.ENDED_ORPHANED, AttemptEvent.GRACE_OVER): AttemptState.FORGOTTEN,
}
_RUNS = frozenset({AttemptState.RUNNING, AttemptState.ORPHANED})


@dataclass(slots=True)
class _Sequence:
    """What was reported of one sequence of an attempt."""

    first_index: int
    token_ids: array[int] = field(default_factory=lambda: array("I"))
    logprobs: LogprobLog = field(default_factory=LogprobLog)
    num_logprobs: int = 0
    """Number of log-probabilities, those of alternatives included."""
    end: RequestDelta | None = None
    draft_counts: DraftCounts | None = None
    """What became of all its drafts; None: it had none."""

    @property
    def num_entries(self) -> int:
        """How much memory it takes, counted in tokens and log-probabilities."""
        embedded = len(self.end.embedding) // 4 if self.end is not None else 0
        return len(self.token_ids) + self.num_logprobs + embedded


class Attempt:
    """One attempt and all that it has brought, the size of which its request bounds."""

    def __init__(
        self,
        key: AttemptKey,
        owner: int,
        router: str,
        clock: AttemptClock,
        given: Sequence[int] = (),
        takeover: int = 0,
    ) -> None:
        """`owner`: the client index of its router's port. `router`: that router's incarnation. `given`: output tokens
        that it was submitted with. `takeover`: see `baton.messages.node.Adopt`.
        """
        self.key = key
        self.owner: int | None = owner
        """The client index of its router's port; None once that port is closed."""
        self.router = router
        self.takeover = takeover
        """The largest takeover number of a router that owned it; 0: none had a number."""
        self.clock = clock
        self.given = tuple(given)
        self.timings: StageTimings | None = None
        """The timings that were reported last."""
        self.prompt_timings: StageTimings | None = None
        """The timings of the node that computed the prompt; see RequestDelta."""
        self._machine = Machine(f"attempt {key}", AttemptState.RUNNING, ATTEMPT_TABLE)
        self._sequences: dict[int, _Sequence] = {}
        self._prompt_logprobs = LogprobRows.of(())

    @property
    def state(self) -> AttemptState:
        return self._machine.state

    @property
    def runs(self) -> bool:
        """Whether the engine has not ended it yet."""
        return self._machine.state in _RUNS

    def feed(self, event: AttemptEvent) -> None:
        """Take a transition; raises IllegalEvent, and changes nothing, for an event that the state does not accept."""
        self._machine.feed(event)

    def lacks_tokens_before(self, first_index: int) -> bool:
        """Whether the first output, which is at this index, follows tokens that it was not submitted with."""
        return not self._sequences and first_index > len(self.given)

    def note(self, delta: RequestDelta) -> None:
        """Keep what is reported of the attempt, or would be if it had a router."""
        sequence = self._sequences.get(delta.sequence_index)
        if sequence is None:
            sequence = self._sequences[delta.sequence_index] = _Sequence(delta.first_index)
        sequence.token_ids.extend(delta.token_ids)
        if delta.logprobs:
            rows = LogprobRows.of(delta.logprobs)
            sequence.logprobs.append(rows)
            sequence.num_logprobs += rows.num_values
        if delta.prompt_logprobs:
            self._prompt_logprobs = LogprobRows.of(delta.prompt_logprobs)
        if delta.timings is not None:
            self.timings = delta.timings
        if delta.prompt_timings is not None:
            self.prompt_timings = delta.prompt_timings
        if delta.draft_counts is not None:
            sequence.draft_counts = delta.draft_counts
        if delta.outcome is not None:
            sequence.end = delta

    @property
    def num_entries(self) -> int:
        """Number of tokens and log-probabilities that it keeps."""
        of_prompt = self._prompt_logprobs.num_values
        return len(self.given) + of_prompt + sum(sequence.num_entries for sequence in self._sequences.values())

    def replayed(self, num_known: Sequence[int] = ()) -> Iterator[RequestDelta]:
        """All that it has brought so far, in order. Tokens that it was submitted with have no log-probabilities.

        `num_known`: the number of leading tokens of each sequence that are left out. An outcome that came with a token
        comes with it again; others follow in a delta of their own, as they did before.
        """
        yield RequestDelta(
            self.key,
            timings=self.timings,
            prompt_logprobs=self._prompt_logprobs,
            prompt_timings=self.prompt_timings,
        )
        known = dict(enumerate(num_known))
        if given := self.given[known.get(0, 0) :]:
            yield RequestDelta(self.key, len(self.given) - len(given), given)
        for index, sequence in sorted(self._sequences.items()):
            yield from self._replayed_sequence(index, sequence, known.get(index, 0))

    def _replayed_sequence(self, index: int, sequence: _Sequence, num_known: int) -> Iterator[RequestDelta]:
        end, num_tokens = sequence.end, len(sequence.token_ids)
        first = min(max(0, num_known - sequence.first_index), num_tokens)
        ends_with_token = end is not None and end.outcome in _OUTCOMES_WITH_TOKEN
        logprobs = sequence.logprobs.whole()
        for start in range(first, num_tokens, _MAX_REPLAYED_TOKENS):
            stop = min(start + _MAX_REPLAYED_TOKENS, num_tokens)
            is_last = stop == num_tokens and ends_with_token
            yield RequestDelta(
                self.key,
                sequence.first_index + start,
                tuple(sequence.token_ids[start:stop]),
                logprobs[start:stop],
                end.outcome if end is not None and is_last else None,
                end.stop_token_id if end is not None and is_last else None,
                timings=end.timings if end is not None and is_last else None,
                sequence_index=index,
                draft_counts=sequence.draft_counts,
            )
        if end is not None and not (ends_with_token and first < num_tokens):
            yield RequestDelta(
                self.key,
                sequence.first_index + num_tokens,
                outcome=end.outcome,
                stop_token_id=end.stop_token_id,
                error=end.error,
                error_field=end.error_field,
                timings=end.timings,
                sequence_index=index,
                transfer_cause=end.transfer_cause,
                embedding=end.embedding,
                draft_counts=sequence.draft_counts,
            )

    def __repr__(self) -> str:
        return f"<Attempt {self.key} {self.state.name} owner={self.owner}>"


class AttemptBook:
    """All attempts of a node that are not forgotten."""

    def __init__(self, grace_s: float, max_ended: int = MAX_ENDED, max_ended_entries: int = MAX_ENDED_ENTRIES) -> None:
        """`grace_s`: how long an orphan runs, and an attempt is kept that has ended."""
        self._grace_s = grace_s
        self._max_ended = max_ended
        self._max_ended_entries = max_ended_entries
        self._attempts: dict[AttemptKey, Attempt] = {}
        self._deadlines: dict[AttemptKey, float] = {}
        """When orphans and ended attempts are forgotten, the earliest first."""
        self._ended: dict[AttemptKey, int] = {}
        """The `num_entries` of each attempt that has ended, the oldest first."""
        self._num_ended_entries = 0
        self._awaited: set[AttemptKey] = set()
        """Attempts that run, and those that ended as orphans."""
        self._fences: FIFOCache[AttemptKey, int] = FIFOCache(MAX_FENCES)
        """The largest takeover number of each adopted attempt that was forgotten lately."""

    @property
    def num_awaited(self) -> int:
        """Number of attempts that a node which stops waits for: those that run, and those that ended as orphans."""
        return len(self._awaited)

    @property
    def next_deadline(self) -> float | None:
        """When `expire` has something to do; None: never."""
        return next(iter(self._deadlines.values()), None)

    def add(self, attempt: Attempt) -> None:
        """Add an attempt that runs from now on, and forget one with the same key that has ended.

        Raises ValueError if one with the same key runs.
        """
        known = self._attempts.get(attempt.key)
        if known is not None:
            if known.runs:
                raise ValueError(f"{known!r} runs already")
            self._forget(known, AttemptEvent.ABORTED)
        self._attempts[attempt.key] = attempt
        self._awaited.add(attempt.key)

    def get(self, key: AttemptKey) -> Attempt | None:
        """The attempt with this key, unless it is forgotten."""
        return self._attempts.get(key)

    def running(self, key: AttemptKey) -> Attempt | None:
        """The attempt with this key, if the engine has not ended it."""
        attempt = self._attempts.get(key)
        return attempt if attempt is not None and attempt.runs else None

    def running_for(self, owner: int) -> list[Attempt]:
        """The attempts of one router that have not ended."""
        return [attempt for attempt in self._attempts.values() if attempt.owner == owner and attempt.runs]

    def all_running(self) -> list[Attempt]:
        """The attempts that have not ended, those that wait for adoption included."""
        return [attempt for attempt in self._attempts.values() if attempt.runs]

    def owners(self) -> set[int | None]:
        """The client indices of routers that have attempts which have not ended; None among them for orphans."""
        return {attempt.owner for attempt in self._attempts.values() if attempt.runs}

    def ended(self, attempt: Attempt, now: float) -> None:
        """The engine has ended an attempt, and its last delta is kept."""
        attempt.feed(AttemptEvent.FINISHED)
        if self._grace_s <= 0:
            self._forget(attempt, AttemptEvent.GRACE_OVER)
            return
        if attempt.state is AttemptState.ENDED:
            self._awaited.discard(attempt.key)
            self._set_deadline(attempt.key, now)
        # An orphan has a deadline already.
        self._ended[attempt.key] = attempt.num_entries
        self._num_ended_entries += self._ended[attempt.key]
        self._keep_bounds()

    def detached(self, owner: int, now: float) -> None:
        """A router's stream has ended: its attempts are orphans from now on."""
        for attempt in [attempt for attempt in self._attempts.values() if attempt.owner == owner]:
            attempt.owner = None
            attempt.feed(AttemptEvent.DETACHED)
            self._set_deadline(attempt.key, now)

    def newer_takeover(self, key: AttemptKey, takeover: int, router: str) -> int | None:
        """The takeover number of the attempt's owner, if a router with the number `takeover` may not touch the attempt;
        None if it may.

        A number belongs to one call of the client, so to one router. If two routers have the same number, their clients
        don't count calls and the routers don't know of each other; then the first one to arrive keeps the attempt.
        """
        attempt = self._attempts.get(key)
        if takeover == 0:
            return None
        if attempt is None:
            fence = self._fences.get(key, 0)
            return fence if takeover < fence else None
        is_taken = takeover == attempt.takeover and router != attempt.router
        return attempt.takeover if takeover < attempt.takeover or is_taken else None

    def adopt(self, key: AttemptKey, owner: int, router: str, now: float, takeover: int = 0) -> Attempt | None:
        """Make this router the owner of the attempt; None if the attempt is not known. Call `newer_takeover` first."""
        attempt = self._attempts.get(key)
        if attempt is None:
            return None
        attempt.feed(AttemptEvent.ADOPTED)
        attempt.owner, attempt.router = owner, router
        attempt.takeover = max(attempt.takeover, takeover)
        self._deadlines.pop(key, None)
        if attempt.runs:
            return attempt
        self._awaited.discard(key)
        self._set_deadline(key, now)
        return attempt

    def aborted(self, attempt: Attempt) -> None:
        """Nobody wants the attempt any more: forget it."""
        self._forget(attempt, AttemptEvent.ABORTED)

    def forget_orphans_of(self, router: str, keeps: Set[AttemptKey] = frozenset()) -> list[Attempt]:
        """Forget the orphans of a router that has attached again, except those that it keeps: it has tried the others
        on other nodes.

        Returns those that run, which are to be aborted.
        """
        orphans = [attempt for attempt in self._attempts.values() if attempt.owner is None and attempt.router == router]
        unwanted = [attempt for attempt in orphans if attempt.key not in keeps]
        running = [attempt for attempt in unwanted if attempt.runs]
        for attempt in unwanted:
            self._forget(attempt, AttemptEvent.ABORTED)
        return running

    def expire(self, now: float) -> list[Attempt]:
        """Forget attempts whose grace is over; returns those that run, which are to be aborted."""
        due: list[Attempt] = []
        for key, deadline in self._deadlines.items():
            if deadline > now:
                break
            due.append(self._attempts[key])
        running = [attempt for attempt in due if attempt.runs]
        for attempt in due:
            self._forget(attempt, AttemptEvent.GRACE_OVER)
        return running

    def _set_deadline(self, key: AttemptKey, now: float) -> None:
        # It goes behind all others: all have the same grace, so the order of the dictionary is that of the deadlines.
        self._deadlines.pop(key, None)
        self._deadlines[key] = now + self._grace_s

    def _keep_bounds(self) -> None:
        while len(self._ended) > self._max_ended or self._num_ended_entries > self._max_ended_entries:
            self._forget(self._attempts[next(iter(self._ended))], AttemptEvent.GRACE_OVER)

    def _forget(self, attempt: Attempt, event: AttemptEvent) -> None:
        attempt.feed(event)
        key = attempt.key
        if attempt.takeover > 1:
            self._fences[key] = attempt.takeover
        del self._attempts[key]
        self._deadlines.pop(key, None)
        self._num_ended_entries -= self._ended.pop(key, 0)
        self._awaited.discard(key)
