"""A flight's states and the table of its transitions; what comes in and what goes out, as values.

A flight is one client request from admission to its single terminal state:

    PLACING     waits for its first pair of nodes
    PREFILLING  its legs are sent; no token of this attempt has come
    STREAMING   tokens of this attempt come
    RETRYING    an attempt failed; waits for another pair
    FINISHED, FAILED, CANCELLED: final, and nothing that arrives later changes anything
"""

from __future__ import annotations

import enum
from collections.abc import Sequence, Set
from typing import Final, TypeAlias

from baton.errors import BatonError
from baton.messages.generation import Path
from baton.messages.ids import AttemptKey
from baton.messages.node import Abort, Adopt, RequestDelta, StageTimings, Submit
from baton.messages.sampling import TokenLogprobs
from baton.values import value
from router.placement.placement import Placement


class FlightState(enum.Enum):
    """Where a flight is."""

    PLACING = "placing"
    PREFILLING = "prefilling"
    STREAMING = "streaming"
    RETRYING = "retrying"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"

    __hash__ = object.__hash__  # by identity: Enum's own is a call into Python, in every lookup of the table


class FlightStep(enum.Enum):
    """What moves a flight on; the events below come down to these."""

    PLACED = enum.auto()
    TOKENS = enum.auto()
    LEG_LOST = enum.auto()
    REFUSED = enum.auto()
    ENDED = enum.auto()
    STOP_STRING = enum.auto()
    GAVE_UP = enum.auto()
    CANCEL = enum.auto()

    __hash__ = object.__hash__


_S, _E = FlightState, FlightStep
LIVE: Final = (_S.PLACING, _S.PREFILLING, _S.STREAMING, _S.RETRYING)
TERMINAL: Final = (_S.FINISHED, _S.FAILED, _S.CANCELLED)

FLIGHT_TABLE: Final[dict[tuple[FlightState, FlightStep], FlightState]] = {
    (_S.PLACING, _E.PLACED): _S.PREFILLING,
    (_S.RETRYING, _E.PLACED): _S.PREFILLING,
    (_S.PREFILLING, _E.TOKENS): _S.STREAMING,
    (_S.STREAMING, _E.TOKENS): _S.STREAMING,
    (_S.PREFILLING, _E.LEG_LOST): _S.RETRYING,
    (_S.STREAMING, _E.LEG_LOST): _S.RETRYING,
    (_S.PREFILLING, _E.REFUSED): _S.RETRYING,
    (_S.STREAMING, _E.REFUSED): _S.RETRYING,
    (_S.PREFILLING, _E.ENDED): _S.FINISHED,
    (_S.STREAMING, _E.ENDED): _S.FINISHED,
    (_S.STREAMING, _E.STOP_STRING): _S.FINISHED,
    # The message that brought the text can also have ended the attempt.
    (_S.RETRYING, _E.STOP_STRING): _S.FINISHED,
    **{(state, _E.GAVE_UP): _S.FAILED for state in LIVE},
    **{(state, _E.CANCEL): _S.CANCELLED for state in LIVE},
}


@value(frozen=True, slots=True)
class Placed:
    """Nodes were chosen: the answer to `Place`."""

    placement: Placement


@value(frozen=True, slots=True)
class Delta:
    """A node's message about one attempt."""

    incarnation: str
    delta: RequestDelta


@value(frozen=True, slots=True)
class NodeGone:
    """An incarnation died or fell silent."""

    incarnation: str
    reason: str
    lost_together: Set[str] = frozenset()
    """The incarnations that the router lost within the same few seconds, this one among them."""


@value(frozen=True, slots=True)
class LinkBack:
    """The stream to an incarnation was cut and is open again: what runs there for this flight waits to be adopted."""

    incarnation: str


@value(frozen=True, slots=True)
class StopStringFound:
    """The text of a sequence's tokens given out so far contains a stop string."""

    stop: str
    sequence_index: int = 0


@value(frozen=True, slots=True)
class Cancel:
    """The client went away or asked to stop."""

    reason: str


@value(frozen=True, slots=True)
class GiveUp:
    """The router ends the flight: deadline, nobody to serve it, a reader that does not read, shutdown."""

    error: BatonError


@value(frozen=True, slots=True)
class LetGo:
    """The router ends: another one is to go on with what the nodes run for it."""

    error: BatonError


FlightEvent: TypeAlias = Placed | Delta | NodeGone | LinkBack | StopStringFound | Cancel | GiveUp | LetGo


class AttemptCause(enum.Enum):
    """Why there is an attempt; the value is what operators see."""

    FIRST = "first"
    NODE_LOST = "node_lost"
    KV_LOST = "kv_lost"
    REFUSED = "refused"
    GIVEN_UP = "given_up"
    """Its node aborted the one before."""
    RESUMED = "resumed"
    """Its client came back, and the nodes of the one before are not there any more..."""
    NOT_KEPT = "not_kept"
    """... or are, and have nothing of it."""


@value(frozen=True, slots=True)
class Place:
    """Choose nodes for this attempt, none of `exclude`."""

    attempt: int
    exclude: frozenset[str]
    cause: AttemptCause = AttemptCause.FIRST


@value(frozen=True, slots=True)
class SubmitLeg:
    """Send a leg to a node."""

    incarnation: str
    submit: Submit


@value(frozen=True, slots=True)
class AdoptLeg:
    """Tell a node that an attempt which another router began, or this one on an earlier stream, is ours from now on."""

    incarnation: str
    adopt: Adopt
    num_sequences: int


@value(frozen=True, slots=True)
class AbortLeg:
    """Tell a node that the attempt is over."""

    incarnation: str
    abort: Abort


@value(frozen=True, slots=True)
class LegEnded:
    """The node no longer has this leg: it counts no more towards the node's load."""

    incarnation: str
    attempt: AttemptKey


@value(frozen=True, slots=True)
class EmitTokens:
    """Give these tokens to the client."""

    first_index: int
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs]
    ends_with_stop_token: bool
    """The last one is the token that ended the text; it is no part of the text."""
    sequence_index: int = 0


@value(frozen=True, slots=True)
class SequenceEnded:
    """One of several sequences ended well. A flight of one sequence only finishes."""

    sequence_index: int
    finish_reason: str
    stop_reason: int | str | None


@value(frozen=True, slots=True)
class Finish:
    """The flight ended well; the reasons are those of sequence 0."""

    finish_reason: str
    stop_reason: int | str | None
    timings: StageTimings
    path: Path
    embedding: bytes = b""
    """Of a request that embeds."""


@value(frozen=True, slots=True)
class Fail:
    """The flight ended with this error."""

    error: BatonError


@value(frozen=True, slots=True)
class MovedAway:
    """The flight goes on at another router; here it ended with this error."""

    error: BatonError


FlightEffect: TypeAlias = (
    Place | SubmitLeg | AdoptLeg | AbortLeg | LegEnded | EmitTokens | SequenceEnded | Finish | Fail | MovedAway
)
