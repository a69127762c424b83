"""Continues one stream when the router that serves it is lost. Does no I/O: events and errors in, the next call out.

The rules:

1. The client draws the request id and the seed, so that the request can be repeated exactly: its tokens are a function
of
   the request alone.
2. A lost stream is continued at the next router, behind the positions that the caller has. If no router knows the
request
   any more, it is generated again: what the caller has is compared with the new stream and dropped. Token ids are
   compared one by one, text by its length, since it may be cut into other pieces.
3. Before a router has accepted the request, each address is tried once; then the error is the caller's, a refusal
rather
   than a router that could not be reached. After acceptance all addresses are tried until the budget is spent. The
   budget is charged for the time in which no router has the request: from the loss of the stream to the next Accepted.
   An accepted request that waits for a node or for its prefill at a live router is not charged, however long that
   takes, unless that router then turns it away, in which case the whole wait is charged. Each new event for the caller
   restores the budget.
4. An error about the request itself (invalid, failed, cancelled, too late) is final. 5. Calls are numbered. If several
routers take themselves to serve the request, its nodes obey the one with the latest call.
   When a router lets go of the request, or was told that another one serves it, the client goes to the next router.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random

from baton.client.endpoint_rotation import EndpointRotation
from baton.errors import (
    BatonError,
    ContinuedElsewhere,
    DuplicateRequest,
    Overloaded,
    QueueFull,
    QuotaExceeded,
    RequestNotFound,
    StreamDiverged,
    Unreachable,
    WouldBeLate,
)
from baton.messages.generation import Accepted, Chunk, Finished, GenerateEvent, GenerateRequest, SequenceFinished
from baton.messages.ids import new_request_id

_SEED_BITS = 53
_FIRST_WAIT_S = 0.05
_LAST_WAIT_S = 1.0
_RECONNECT_S = 5.0
"""Seconds after the last progress in which a refused connection is worth another try: the router may be restarting."""


class CallKind(enum.Enum):
    """The RPC to call."""

    GENERATE = "generate"
    RESUME = "resume"


@dataclass(frozen=True, slots=True)
class Call:
    """The next call, and the index of the router's address."""

    kind: CallKind
    place: int
    positions: Sequence[int]
    """The next position of each sequence, for `RESUME`."""
    number: int = 1
    """The number of the call, from 1."""


@dataclass(slots=True)
class _Given:
    """What the caller has of one sequence, and how much of that the present call has repeated."""

    token_ids: list[int] = field(default_factory=list)
    position: int = 0
    """The number of tokens, plus one when the last piece of text came without a token."""
    num_chars: int = 0
    call_position: int = 0
    call_chars: int = 0

    def begin_call(self, *, repeats: bool) -> None:
        self.call_position = 0 if repeats else self.position
        self.call_chars = 0 if repeats else self.num_chars

    def take(self, chunk: Chunk) -> Chunk | None:
        """The part of the chunk that is new. Raises StreamDiverged if it contradicts what the caller has."""
        if chunk.first_index != self.call_position:
            raise StreamDiverged(f"token {chunk.first_index} came where token {self.call_position} was due")
        known = self.token_ids[chunk.first_index : chunk.first_index + len(chunk.token_ids)]
        if known != list(chunk.token_ids[: len(known)]):
            raise StreamDiverged(f"from token {chunk.first_index} on other tokens came than before")
        num_chars = max(0, self.num_chars - self.call_chars)
        self.call_position = chunk.next_position
        self.call_chars += len(chunk.text)
        if self.call_position <= self.position:
            return None
        self.position = self.call_position
        self.num_chars = max(self.num_chars, self.call_chars)
        if not known and not num_chars:
            self.token_ids += chunk.token_ids
            return chunk
        first = len(known)
        self.token_ids += chunk.token_ids[first:]
        return replace(
            chunk,
            first_index=chunk.first_index + first,
            token_ids=chunk.token_ids[first:],
            text=chunk.text[num_chars:],
            logprobs=chunk.logprobs[first:],
        )


def repeatable(request: GenerateRequest, rng: Random) -> GenerateRequest:
    """The request with an id and a seed, so that sending it again brings the same tokens."""
    return replace(
        request,
        request_id=request.request_id or new_request_id(rng),
        seed=rng.getrandbits(_SEED_BITS) if request.seed is None else request.seed,
    )


class Continuation:
    """One stream over as many calls as it takes: `next_call`, then `take` for each event or `failed`, and so on."""

    def __init__(
        self, endpoints: EndpointRotation, rng: Random, now: float, budget_s: float, *, owns_id: bool = True
    ) -> None:
        """`owns_id`: the client drew the request id, so that no other client can have sent it."""
        self.num_calls = 0
        self._endpoints = endpoints
        self._rng = rng
        self._budget_s = budget_s
        self._owns_id = owns_id
        self._kind = CallKind.GENERATE
        self._place = endpoints.first(now)
        self._sequences: dict[int, _Given] = {}
        self._ended: set[int] = set()
        self._is_accepted = False
        self._last_progress = now
        self._spent_s = 0.0
        """Seconds of the budget that were spent since the last new event."""
        self._lost_at: float | None = now
        """The time since which no router has the request; None while one has it."""
        self._served_since = now
        """The time when a router last accepted the request or brought something new."""
        self._failures = 0
        """Failed calls since the last new event."""
        self._refusal: Overloaded | None = None
        """The latest refusal of this request; a router that is stopping or without nodes is none."""

    def next_call(self) -> Call:
        """The call to make now."""
        self.num_calls += 1
        for given in self._sequences.values():
            given.begin_call(repeats=self._kind is CallKind.GENERATE)
        count = 1 + max(self._sequences, default=0)
        positions = [self._sequences[i].position if i in self._sequences else 0 for i in range(count)]
        return Call(self._kind, self._place, positions, self.num_calls)

    def take(self, event: GenerateEvent, now: float) -> GenerateEvent | None:
        """The part of an event that is new to the caller; None if nothing is. Raises StreamDiverged."""
        self._endpoints.has_answered = True
        if self._lost_at is not None:
            self._spent_s += now - self._lost_at
            self._lost_at, self._served_since = None, now
        fresh = self._fresh(event)
        if fresh is not None:
            self._last_progress = self._served_since = now
            self._failures = 0
            self._spent_s = 0.0
        return fresh

    def _fresh(self, event: GenerateEvent) -> GenerateEvent | None:
        match event:
            case Chunk():
                return self._sequences.setdefault(event.sequence_index, _Given()).take(event)
            case Accepted():
                is_first, self._is_accepted = not self._is_accepted, True
                return event if is_first else None
            case SequenceFinished(index):
                is_first = index not in self._ended
                self._ended.add(index)
                return event if is_first else None
            case Finished():
                return event

    def failed(self, error: BatonError, now: float) -> float:
        """Note that the call ended with this error. Returns the seconds to wait before the next call.

        Raises the error if it is final.
        """
        self._failures += 1
        self._charge(error, now)
        if self._spent_s > self._budget_s:
            raise error
        if isinstance(error, RequestNotFound) and self._kind is CallKind.RESUME:
            self._kind = CallKind.GENERATE
        elif isinstance(error, DuplicateRequest) and (self._owns_id or self.num_calls > 1):
            self._kind = CallKind.RESUME
        elif isinstance(error, Unreachable | Overloaded | ContinuedElsewhere):
            self._move_on(error, now)
        else:
            raise error
        return self._wait_s()

    def _charge(self, error: BatonError, now: float) -> None:
        if self._lost_at is not None:
            self._spent_s += now - self._lost_at
        elif isinstance(error, Overloaded):
            self._spent_s += now - self._served_since
        self._lost_at = now

    def _move_on(self, error: BatonError, now: float) -> None:
        if isinstance(error, Unreachable):
            self._endpoints.doubt(self._place, now)
        elif isinstance(error, QueueFull | WouldBeLate | QuotaExceeded):
            self._refusal = error
        if not self._is_accepted and self._failures >= len(self._endpoints) and not self._may_be_back(error, now):
            raise self._refusal or error
        self._place = self._endpoints.after(self._place, now)
        if self._is_accepted:
            self._kind = CallKind.RESUME

    def _may_be_back(self, error: BatonError, now: float) -> bool:
        """Whether another round is worthwhile though no router took the request: only connections were lost so far."""
        if not self._endpoints.has_answered or self._refusal is not None:
            return False
        return isinstance(error, Unreachable) and now - self._last_progress < _RECONNECT_S

    def _wait_s(self) -> float:
        """Seconds to wait: 0 for the first attempt at each address, then increasing with each round, with jitter."""
        rounds = self._failures - len(self._endpoints) - 1
        if rounds < 0:
            return 0.0
        longest = min(_LAST_WAIT_S, _FIRST_WAIT_S * 2.0 ** min(rounds, 16))
        return longest * (0.5 + 0.5 * self._rng.random())
