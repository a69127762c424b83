"""How one answer outlives the routers that bring it. Pure: events and errors in, what to do next out.

The rules:

1. The client draws request id and seed, so that the request can be repeated exactly: its tokens are a function of it.
2. A lost stream is continued at the next router, from the positions behind what was given out. Where nobody knows the
   request any more it is generated again: what was given out is dropped, and compared; text by its length, since pieces
   may be cut differently.
3. Before a router has accepted the request, each address is tried once: then it is for the caller to decide, who hears
   of a refusal rather than of a router that could not be reached. Afterwards everything is tried until the budget is
   spent. What is charged is the time in which no router has the request: from a lost stream to the next Accepted. An
   accepted request that waits for a node or for its prefill at a router that lives costs nothing, however long that
   takes; only if that router then turns it away is the whole wait charged. Something new for the caller refills the
   budget.
4. What a router says of the request itself (bad, failed, cancelled, too late) is final.
5. Calls are counted. Of several routers that believe to serve the request, its nodes obey the one with the latest call.
   A router that lets go of the request, or was told that another one has it, is left for the next one.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random

from baton.client.rota import Rota
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
"""A connection that was refused is not tried again at once, though a router may be back since."""


class CallKind(enum.Enum):
    """What to ask a router for."""

    GENERATE = "generate"
    RESUME = "resume"


@dataclass(frozen=True, slots=True)
class Call:
    """The next thing to do: call the router at this place of the rota."""

    kind: CallKind
    place: int
    positions: Sequence[int]
    """For each sequence, where to go on; for `RESUME`."""
    number: int = 1
    """The how-manieth call it is, from 1."""


@dataclass(slots=True)
class _Given:
    """What the caller has of one sequence, and how far the running call has repeated it."""

    token_ids: list[int] = field(default_factory=list)
    position: int = 0
    """Tokens, and one more once the rest of the text came without any."""
    num_chars: int = 0
    call_position: int = 0
    call_chars: int = 0

    def begin_call(self, *, repeats: bool) -> None:
        self.call_position = 0 if repeats else self.position
        self.call_chars = 0 if repeats else self.num_chars

    def take(self, chunk: Chunk) -> Chunk | None:
        """What of it is new; raises StreamDiverged for what contradicts."""
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
    """The request with an id and a seed: sent again, it brings the same."""
    return replace(
        request,
        request_id=request.request_id or new_request_id(rng),
        seed=rng.getrandbits(_SEED_BITS) if request.seed is None else request.seed,
    )


class Continuation:
    """One answer over as many calls as it takes. `next_call`, then `take` for each event or `failed`, and so on."""

    def __init__(self, rota: Rota, rng: Random, now: float, budget_s: float, *, owns_id: bool = True) -> None:
        """`owns_id`: nobody else can have asked for the same request id."""
        self.num_calls = 0
        self._rota = rota
        self._rng = rng
        self._budget_s = budget_s
        self._owns_id = owns_id
        self._kind = CallKind.GENERATE
        self._place = rota.first(now)
        self._sequences: dict[int, _Given] = {}
        self._ended: set[int] = set()
        self._is_accepted = False
        self._last_progress = now
        self._spent_s = 0.0
        """Of the budget, since something new came."""
        self._lost_at: float | None = now
        """Since when no router has the request; None while one does."""
        self._served_since = now
        """When one took it last, or brought something new."""
        self._failures = 0
        """Since something new came."""
        self._refusal: Overloaded | None = None
        """The latest one that is about this request, and not about a router that closes or has no nodes."""

    def next_call(self) -> Call:
        """What to do now."""
        self.num_calls += 1
        for given in self._sequences.values():
            given.begin_call(repeats=self._kind is CallKind.GENERATE)
        count = 1 + max(self._sequences, default=0)
        positions = [self._sequences[i].position if i in self._sequences else 0 for i in range(count)]
        return Call(self._kind, self._place, positions, self.num_calls)

    def take(self, event: GenerateEvent, now: float) -> GenerateEvent | None:
        """What of an event the caller has not got yet; raises StreamDiverged."""
        self._rota.has_answered = True
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
        """The call ended with this error: in how many seconds to do the next one. Raises the error if it is final."""
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
            self._rota.doubt(self._place, now)
        elif isinstance(error, QueueFull | WouldBeLate | QuotaExceeded):
            self._refusal = error
        if not self._is_accepted and self._failures >= len(self._rota) and not self._may_be_back(error, now):
            raise self._refusal or error
        self._place = self._rota.after(self._place, now)
        if self._is_accepted:
            self._kind = CallKind.RESUME

    def _may_be_back(self, error: BatonError, now: float) -> bool:
        """Whether it is worth asking again though nobody took the request: all that is lost so far is connections."""
        if not self._rota.has_answered or self._refusal is not None:
            return False
        return isinstance(error, Unreachable) and now - self._last_progress < _RECONNECT_S

    def _wait_s(self) -> float:
        """None for the first try at each address and the questions that follow from an answer, then ever longer."""
        rounds = self._failures - len(self._rota) - 1
        if rounds < 0:
            return 0.0
        longest = min(_LAST_WAIT_S, _FIRST_WAIT_S * 2.0 ** min(rounds, 16))
        return longest * (0.5 + 0.5 * self._rng.random())
