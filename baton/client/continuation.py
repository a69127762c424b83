"""Continues one stream when the router that serves it is lost. Does no I/O: events and errors in, the next call out.

The rules:

1. The client draws the request id and the seed, so that the request can be repeated exactly: its tokens are a
   function of the request alone.
2. A lost stream is continued at the next router, behind the positions that the caller has. If no router knows the
   request any more, it is generated again: what the caller has is compared with the new stream and dropped. Token ids
   are compared one by one, text by its length, since it may be cut into other pieces.
3. Before a router has accepted the request, each address is tried once. If all fail, the caller gets the latest
   refusal, or the latest error if there was no refusal. After acceptance all addresses are tried until the retry budget
   is spent. The budget is charged for the time in which no router has the request: from the loss of the stream to the
   next Accepted. An accepted request that waits for a node or for its prefill at a live router is not charged, however
   long that takes, unless that router then refuses it, in which case the whole wait is charged. Each new event for the
   caller restores the budget.
4. An error about the request itself (invalid, failed, cancelled, too late) is final.
5. Calls are numbered. If several routers believe that they serve the request, its nodes obey the one with the latest
   call. When a router gives the request up because another one serves it, the client goes to the next router."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random

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
from baton.messages.generation import (
    Accepted,
    Chunk,
    Finished,
    GenerateEvent,
    GenerateRequest,
    PromptLogprobs,
    SequenceFinished,
)
from baton.messages.ids import new_request_id

AVOID_S = 3.0
"""Seconds for which a router that did not answer is tried only after the others."""
_SEED_BITS = 53
_FIRST_WAIT_S = 0.05
_LAST_WAIT_S = 1.0
_RECONNECT_S = 5.0
"""Seconds after the last progress in which a refused connection is worth another try: the router may be restarting."""


class EndpointRotation:
    """The addresses of a cluster's routers, and which of them to call next. Does no I/O; time is an argument."""

    def __init__(self, addresses: Sequence[str], rng: Random) -> None:
        if not addresses:
            raise ValueError("a client needs the address of a router")
        self.addresses = tuple(addresses)
        self._rng = rng
        self.has_answered = False
        """Whether any router has answered, so that there is a cluster at these addresses."""
        self._avoided_until = dict.fromkeys(range(len(addresses)), 0.0)

    def __len__(self) -> int:
        return len(self.addresses)

    def pick_first(self, now: float) -> int:
        """The index of the router to which a new request is sent."""
        good = [index for index in range(len(self)) if self._avoided_until[index] <= now]
        return self._rng.choice(good or range(len(self)))

    def pick_next(self, failed: int, now: float) -> int:
        """The index of the router that is tried after router `failed`: the next one that is not avoided at present, or
        the next one if all are."""
        others = [(failed + step) % len(self) for step in range(1, len(self))]
        good = [endpoint for endpoint in others if self._avoided_until[endpoint] <= now]
        return (good or others or [failed])[0]

    def note_failure(self, index: int, now: float) -> None:
        """Note that this router did not answer: it is avoided for AVOID_S seconds."""
        self._avoided_until[index] = now + AVOID_S


class CallKind(enum.Enum):
    """The RPC to call."""

    GENERATE = "generate"
    RESUME = "resume"


@dataclass(frozen=True, slots=True)
class Call:
    """The next call that the client makes for its request."""

    kind: CallKind
    endpoint: int
    """The index of the router's address."""
    positions: Sequence[int]
    """The next position of each sequence, for `RESUME`."""
    number: int = 1
    """The number of the call, counted from 1."""


@dataclass(slots=True)
class _DeliveredSequence:
    """The part of one sequence that the caller has, and how much of it the present call has repeated."""

    token_ids: list[int] = field(default_factory=list)
    position: int = 0
    """The number of tokens, plus one when the last piece of text came without a token."""
    num_chars: int = 0
    """The length of the text, in characters."""
    call_position: int = 0
    """The position that the present call has reached."""
    call_chars: int = 0
    """The length of the text up to `call_position`, in characters."""

    def begin_call(self, *, from_start: bool) -> None:
        """Begin a call that sends the sequence from its start, or else only what the caller does not have."""
        self.call_position = 0 if from_start else self.position
        self.call_chars = 0 if from_start else self.num_chars

    def add(self, chunk: Chunk) -> Chunk | None:
        """Add a chunk. Returns the part that is new to the caller; None if nothing is.

        Raises StreamDiverged if the chunk contradicts what the caller has.
        """
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


def with_id_and_seed(request: GenerateRequest, rng: Random) -> GenerateRequest:
    """The request with a request id and a seed, so that sending it again gives the same tokens."""
    return replace(
        request,
        request_id=request.request_id or new_request_id(rng),
        seed=rng.getrandbits(_SEED_BITS) if request.seed is None else request.seed,
    )


class Continuation:
    """One stream that is continued over several calls.

    The owner makes the call that `next_call` returns. It passes each event to `receive`, and the error with which the
    call ends to `call_failed`, after which it makes the next call.
    """

    def __init__(
        self, endpoints: EndpointRotation, rng: Random, now: float, budget_s: float, *, owns_id: bool = True
    ) -> None:
        """`budget_s`: the retry budget, seconds. `owns_id`: the client drew the request id itself, so that no other
        client can have sent it.
        """
        self.num_calls = 0
        self._endpoints = endpoints
        self._rng = rng
        self._budget_s = budget_s
        self._owns_id = owns_id
        self._kind = CallKind.GENERATE
        self._endpoint = endpoints.pick_first(now)
        self._sequences: dict[int, _DeliveredSequence] = {}
        self._ended: set[int] = set()
        self._is_accepted = False
        self._has_prompt_logprobs = False
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
        for sequence in self._sequences.values():
            sequence.begin_call(from_start=self._kind is CallKind.GENERATE)
        count = 1 + max(self._sequences, default=0)
        positions = [self._sequences[i].position if i in self._sequences else 0 for i in range(count)]
        return Call(self._kind, self._endpoint, positions, self.num_calls)

    def receive(self, event: GenerateEvent, now: float) -> GenerateEvent | None:
        """Take an event of the present call. Returns the part that is new to the caller; None if nothing is.

        Raises StreamDiverged if the event contradicts what the caller has.
        """
        self._endpoints.has_answered = True
        if self._lost_at is not None:
            self._spent_s += now - self._lost_at
            self._lost_at, self._served_since = None, now
        new_part = self._new_part(event)
        if new_part is not None:
            self._last_progress = self._served_since = now
            self._failures = 0
            self._spent_s = 0.0
        return new_part

    def _new_part(self, event: GenerateEvent) -> GenerateEvent | None:
        match event:
            case Chunk():
                return self._sequences.setdefault(event.sequence_index, _DeliveredSequence()).add(event)
            case Accepted():
                is_first, self._is_accepted = not self._is_accepted, True
                return event if is_first else None
            case PromptLogprobs():
                is_first, self._has_prompt_logprobs = not self._has_prompt_logprobs, True
                return event if is_first else None
            case SequenceFinished(index):
                is_first = index not in self._ended
                self._ended.add(index)
                return event if is_first else None
            case Finished():
                return event

    def call_failed(self, error: BatonError, now: float) -> float:
        """Note that the present call ended with this error. Returns the seconds to wait before the next call.

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
            self._endpoints.note_failure(self._endpoint, now)
        elif isinstance(error, QueueFull | WouldBeLate | QuotaExceeded):
            self._refusal = error
        if not self._is_accepted and self._failures >= len(self._endpoints) and not self._may_be_restarting(error, now):
            raise self._refusal or error
        self._endpoint = self._endpoints.pick_next(self._endpoint, now)
        if self._is_accepted:
            self._kind = CallKind.RESUME

    def _may_be_restarting(self, error: BatonError, now: float) -> bool:
        """Whether to try all routers once more before the request is accepted, since they may be restarting.

        That is so if one has answered before, none has refused the request, and only connections were lost.
        """
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
