"""Whose attempt is whose, and what each one brought: so that a router can go on with what another one began.

An attempt belongs to the router that submitted it until another one adopts it. When its router's stream ends it runs on
as an orphan, for a grace, in which that router itself may adopt it, too: its link was cut. What ended of late is kept
as long: nobody knows whether its last report arrived. Pure: time is an argument, and what follows for the engine is
returned.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field

from cachetools import FIFOCache

from baton.machine import Machine
from baton.messages.ids import AttemptKey
from baton.messages.node import Outcome, RequestDelta, StageTimings
from baton.messages.sampling import TokenLogprobs
from baton.node.attempts.attempt_clock import AttemptClock

MAX_ENDED = 4096
"""So many attempts that have ended are kept at most..."""
MAX_ENDED_ENTRIES = 4_000_000
"""... and so many of their tokens and log-probabilities."""
MAX_FENCES = 4096
"""Of so many forgotten attempts it is known who adopted them: a late abort must not withdraw what is still read."""
_TOLD_AT_ONCE = 2048
"""Tokens in one delta: with 20 log-probabilities each, a message of half a megabyte."""
_COME_WITH_A_TOKEN = frozenset({Outcome.STOP, Outcome.LENGTH, Outcome.HANDED_OFF})


class AttemptState(enum.Enum):
    """Where an attempt is on its node."""

    RUNNING = enum.auto()
    """For a router that is attached."""
    ORPHANED = enum.auto()
    """It runs on for whoever will adopt it."""
    ENDED = enum.auto()
    """Its router was attached then; kept, since the last report may be lost with that router."""
    UNHEARD = enum.auto()
    """It ended as an orphan: kept for whoever will adopt it."""
    FORGOTTEN = enum.auto()


class AttemptEvent(enum.Enum):
    """What happens to it."""

    DETACHED = enum.auto()
    """Its router's stream has ended."""
    ADOPTED = enum.auto()
    FINISHED = enum.auto()
    """The engine has ended all its sequences."""
    ABORTED = enum.auto()
    GRACE_OVER = enum.auto()


ATTEMPT_TABLE = {
    (AttemptState.RUNNING, AttemptEvent.ADOPTED): AttemptState.RUNNING,
    (AttemptState.RUNNING, AttemptEvent.DETACHED): AttemptState.ORPHANED,
    (AttemptState.RUNNING, AttemptEvent.FINISHED): AttemptState.ENDED,
    (AttemptState.RUNNING, AttemptEvent.ABORTED): AttemptState.FORGOTTEN,
    (AttemptState.ORPHANED, AttemptEvent.ADOPTED): AttemptState.RUNNING,
    (AttemptState.ORPHANED, AttemptEvent.FINISHED): AttemptState.UNHEARD,
    (AttemptState.ORPHANED, AttemptEvent.ABORTED): AttemptState.FORGOTTEN,
    (AttemptState.ORPHANED, AttemptEvent.GRACE_OVER): AttemptState.FORGOTTEN,
    (AttemptState.ENDED, AttemptEvent.DETACHED): AttemptState.ENDED,
    (AttemptState.ENDED, AttemptEvent.ADOPTED): AttemptState.ENDED,
    (AttemptState.ENDED, AttemptEvent.ABORTED): AttemptState.FORGOTTEN,
    (AttemptState.ENDED, AttemptEvent.GRACE_OVER): AttemptState.FORGOTTEN,
    (AttemptState.UNHEARD, AttemptEvent.ADOPTED): AttemptState.ENDED,
    (AttemptState.UNHEARD, AttemptEvent.ABORTED): AttemptState.FORGOTTEN,
    (AttemptState.UNHEARD, AttemptEvent.GRACE_OVER): AttemptState.FORGOTTEN,
}
_RUNS = frozenset({AttemptState.RUNNING, AttemptState.ORPHANED})
_IS_AWAITED = _RUNS | {AttemptState.UNHEARD}


@dataclass(slots=True)
class _Sequence:
    """What was told of one of its sequences."""

    first_index: int
    token_ids: array[int] = field(default_factory=lambda: array("I"))
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    end: RequestDelta | None = None

    @property
    def num_entries(self) -> int:
        """How much of memory it is, in tokens and log-probabilities."""
        per_token = 1 + len(self.logprobs[0].top) if self.logprobs else 0
        embedded = len(self.end.embedding) // 4 if self.end is not None else 0
        return len(self.token_ids) + len(self.logprobs) * per_token + embedded


class Attempt:
    """One attempt and its history, which its request bounds."""

    def __init__(
        self,
        key: AttemptKey,
        owner: int,
        router: str,
        clock: AttemptClock,
        given: Sequence[int] = (),
        takeover: int = 0,
    ) -> None:
        """`owner`: the client index of its router's port; `router`: that router's incarnation; `given`: output tokens
        that it was submitted with; `takeover`: see `baton.messages.node.Adopt`.
        """
        self.key = key
        self.owner: int | None = owner
        """None once that port is closed."""
        self.router = router
        self.takeover = takeover
        """The largest number of a router that owned it; 0: none of them numbers."""
        self.clock = clock
        self.given = tuple(given)
        self.timings: StageTimings | None = None
        """As they were told last."""
        self._machine = Machine(f"attempt {key}", AttemptState.RUNNING, ATTEMPT_TABLE)
        self._sequences: dict[int, _Sequence] = {}

    @property
    def state(self) -> AttemptState:
        return self._machine.state

    @property
    def runs(self) -> bool:
        """Whether the engine has not ended it."""
        return self._machine.state in _RUNS

    def feed(self, event: AttemptEvent) -> None:
        """Raises IllegalEvent, and changes nothing, for one that can't happen now."""
        self._machine.feed(event)

    def note(self, delta: RequestDelta) -> None:
        """This was told of it, or would have been."""
        sequence = self._sequences.get(delta.sequence_index)
        if sequence is None:
            sequence = self._sequences[delta.sequence_index] = _Sequence(delta.first_index)
        sequence.token_ids.extend(delta.token_ids)
        if delta.logprobs:
            sequence.logprobs.extend(delta.logprobs)
        if delta.timings is not None:
            self.timings = delta.timings
        if delta.outcome is not None:
            sequence.end = delta

    @property
    def num_entries(self) -> int:
        """Tokens and log-probabilities that it keeps."""
        return len(self.given) + sum(sequence.num_entries for sequence in self._sequences.values())

    def replayed(self, num_known: Sequence[int] = ()) -> Iterator[RequestDelta]:
        """All that it brought so far, in order; tokens that it was given have no log-probabilities.

        `num_known`: so many tokens of each sequence need not be told. An end that comes with its token is told with it;
        others follow, as they did.
        """
        yield RequestDelta(self.key, timings=self.timings)
        known = dict(enumerate(num_known))
        if given := self.given[known.get(0, 0) :]:
            yield RequestDelta(self.key, len(self.given) - len(given), given)
        for index, sequence in sorted(self._sequences.items()):
            yield from self._sequence_again(index, sequence, known.get(index, 0))

    def _sequence_again(self, index: int, sequence: _Sequence, num_known: int) -> Iterator[RequestDelta]:
        end, num_tokens = sequence.end, len(sequence.token_ids)
        first = min(max(0, num_known - sequence.first_index), num_tokens)
        at_last = end is not None and end.outcome in _COME_WITH_A_TOKEN
        for start in range(first, num_tokens, _TOLD_AT_ONCE):
            stop = min(start + _TOLD_AT_ONCE, num_tokens)
            is_last = stop == num_tokens and at_last
            yield RequestDelta(
                self.key,
                sequence.first_index + start,
                tuple(sequence.token_ids[start:stop]),
                tuple(sequence.logprobs[start:stop]),
                end.outcome if end is not None and is_last else None,
                end.stop_token_id if end is not None and is_last else None,
                timings=end.timings if end is not None and is_last else None,
                sequence_index=index,
            )
        if end is not None and not (at_last and first < num_tokens):
            yield RequestDelta(
                self.key,
                sequence.first_index + num_tokens,
                outcome=end.outcome,
                stop_token_id=end.stop_token_id,
                error=end.error,
                timings=end.timings,
                sequence_index=index,
                transfer_cause=end.transfer_cause,
                embedding=end.embedding,
            )

    def __repr__(self) -> str:
        return f"<Attempt {self.key} {self.state.name} owner={self.owner}>"


class AttemptBook:
    """Every attempt of a node that is not forgotten."""

    def __init__(self, grace_s: float, max_ended: int = MAX_ENDED, max_ended_entries: int = MAX_ENDED_ENTRIES) -> None:
        self._grace_s = grace_s
        self._max_ended = max_ended
        self._max_ended_entries = max_ended_entries
        self._attempts: dict[str, Attempt] = {}
        self._deadlines: dict[str, float] = {}
        """When those that nobody may want any more are forgotten, the earliest first."""
        self._ended: dict[str, int] = {}
        """How much of memory each that has ended is, the oldest first."""
        self._num_ended_entries = 0
        self._awaited: set[str] = set()
        self._fences: FIFOCache[str, int] = FIFOCache(MAX_FENCES)
        """The largest number of a router that adopted each of those that were forgotten of late."""

    @property
    def num_awaited(self) -> int:
        """Those that run, and those that ended as orphans: a node that stops waits for them."""
        return len(self._awaited)

    @property
    def next_deadline(self) -> float | None:
        """When `expire` has something to do."""
        return next(iter(self._deadlines.values()), None)

    def begin(self, attempt: Attempt) -> None:
        """It runs from now on. One of the same name that has ended is forgotten."""
        name = str(attempt.key)
        known = self._attempts.get(name)
        if known is not None:
            if known.runs:
                raise ValueError(f"{known!r} runs already")
            self._forget(known, AttemptEvent.ABORTED)
        self._attempts[name] = attempt
        self._awaited.add(name)

    def get(self, request_id: str) -> Attempt | None:
        """By the request id that the engine sees."""
        return self._attempts.get(request_id)

    def running(self, key: AttemptKey) -> Attempt | None:
        """If the engine has not ended it."""
        attempt = self._attempts.get(str(key))
        return attempt if attempt is not None and attempt.runs else None

    def running_for(self, owner: int) -> list[Attempt]:
        """Those of one router that have not ended."""
        return [attempt for attempt in self._attempts.values() if attempt.owner == owner and attempt.runs]

    def owners(self) -> set[int | None]:
        """The routers whose attempts have not ended."""
        return {attempt.owner for attempt in self._attempts.values() if attempt.runs}

    def finished(self, attempt: Attempt, now: float) -> None:
        """The engine has ended it, and that is noted."""
        attempt.feed(AttemptEvent.FINISHED)
        if self._grace_s <= 0:
            self._forget(attempt, AttemptEvent.GRACE_OVER)
            return
        name = str(attempt.key)
        if attempt.state is AttemptState.ENDED:
            self._awaited.discard(name)
            self._set_deadline(name, now)
        # As an orphan it has a deadline already.
        self._ended[name] = attempt.num_entries
        self._num_ended_entries += self._ended[name]
        self._keep_bounds()

    def detached(self, owner: int, now: float) -> None:
        """This router's stream has ended: what it asked for has the grace to find another one."""
        for attempt in [attempt for attempt in self._attempts.values() if attempt.owner == owner]:
            attempt.owner = None
            attempt.feed(AttemptEvent.DETACHED)
            self._set_deadline(str(attempt.key), now)

    def owner_above(self, key: AttemptKey, takeover: int, router: str) -> int | None:
        """The number of the router that owns the attempt, where a router with this number may not touch it; else None.

        A number belongs to one call of the client, so to one router: two that both have it took it without knowing of
        each other (their clients don't count calls), and the first one to arrive keeps the attempt.
        """
        attempt = self._attempts.get(str(key))
        if takeover == 0:
            return None
        if attempt is None:
            fence = self._fences.get(str(key), 0)
            return fence if takeover < fence else None
        is_others = takeover == attempt.takeover and router != attempt.router
        return attempt.takeover if takeover < attempt.takeover or is_others else None

    def adopt(self, key: AttemptKey, owner: int, router: str, now: float, takeover: int = 0) -> Attempt | None:
        """Make this router the owner of the attempt; None when nothing of it is here. Ask `owner_above` first."""
        name = str(key)
        attempt = self._attempts.get(name)
        if attempt is None:
            return None
        attempt.feed(AttemptEvent.ADOPTED)
        attempt.owner, attempt.router = owner, router
        attempt.takeover = max(attempt.takeover, takeover)
        self._deadlines.pop(name, None)
        if attempt.runs:
            return attempt
        self._awaited.discard(name)
        self._set_deadline(name, now)
        return attempt

    def aborted(self, attempt: Attempt) -> None:
        """Nobody wants it any more."""
        self._forget(attempt, AttemptEvent.ABORTED)

    def superseded(self, router: str, keeps: Set[AttemptKey] = frozenset()) -> list[Attempt]:
        """This run of a router is attached anew, and has tried elsewhere what it had asked for: forget all but what it
        keeps.

        Returns those that run, which are to be aborted.
        """
        orphans = [attempt for attempt in self._attempts.values() if attempt.owner is None and attempt.router == router]
        left = [attempt for attempt in orphans if attempt.key not in keeps]
        running = [attempt for attempt in left if attempt.runs]
        for attempt in left:
            self._forget(attempt, AttemptEvent.ABORTED)
        return running

    def expire(self, now: float) -> list[Attempt]:
        """Forget those whose grace is over; returns those that run, which are to be aborted."""
        due: list[Attempt] = []
        for name, deadline in self._deadlines.items():
            if deadline > now:
                break
            due.append(self._attempts[name])
        running = [attempt for attempt in due if attempt.runs]
        for attempt in due:
            self._forget(attempt, AttemptEvent.GRACE_OVER)
        return running

    def _set_deadline(self, name: str, now: float) -> None:
        # Behind all others: the grace is one for all, so this is the order of the deadlines.
        self._deadlines.pop(name, None)
        self._deadlines[name] = now + self._grace_s

    def _keep_bounds(self) -> None:
        while len(self._ended) > self._max_ended or self._num_ended_entries > self._max_ended_entries:
            self._forget(self._attempts[next(iter(self._ended))], AttemptEvent.GRACE_OVER)

    def _forget(self, attempt: Attempt, event: AttemptEvent) -> None:
        attempt.feed(event)
        name = str(attempt.key)
        if attempt.takeover > 1:
            self._fences[name] = attempt.takeover
        del self._attempts[name]
        self._deadlines.pop(name, None)
        self._num_ended_entries -= self._ended.pop(name, 0)
        self._awaited.discard(name)
