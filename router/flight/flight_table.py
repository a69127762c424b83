"""A flight's states and the table of its transitions, its events, and the effects that it returns, as values.

A flight is one client request from admission to its single terminal state:

    PLACING     waits for its first nodes
    PREFILLING  its legs are sent; no token of this attempt has arrived
    STREAMING   tokens of this attempt arrive, or those of the one from which it takes the stream over
    RETRYING    an attempt failed; the flight waits for other nodes

While it streams, it may be moved to another node: an attempt there, which is none of the flight's as long as it reads
the KV, becomes the running one when the node that had the stream hands it over.

    FINISHED, FAILED, CANCELLED: final, and nothing that arrives later changes anything
"""

from __future__ import annotations

import enum
from collections.abc import Sequence, Set
from dataclasses import replace
from typing import Final, TypeAlias

from baton.errors import BatonError
from baton.messages.generation import Path
from baton.messages.ids import AttemptKey
from baton.messages.node import Abort, Adopt, MoveOut, NodeDescription, RequestDelta, StageTimings, Submit
from baton.messages.sampling import TokenLogprobs
from baton.values import value
from router.placement.placement import Origin, Placement


class FlightState(enum.Enum):
    """The state of a flight."""

    PLACING = "placing"
    PREFILLING = "prefilling"
    STREAMING = "streaming"
    RETRYING = "retrying"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"

    __hash__ = object.__hash__  # by identity: Enum's own is a call into Python, in every lookup of the table


class FlightStep(enum.Enum):
    """The steps of the table, to which the events below come down."""

    PLACED = enum.auto()
    TOKENS = enum.auto()
    LEG_LOST = enum.auto()
    REFUSED = enum.auto()
    ENDED = enum.auto()
    STOP_STRING = enum.auto()
    GAVE_UP = enum.auto()
    CANCEL = enum.auto()
    HANDED_OVER = enum.auto()

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
    # The stream was moved: its last tokens, which can have the end of its text, come with that.
    (_S.STREAMING, _E.HANDED_OVER): _S.STREAMING,
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
    """Nodes were chosen for an attempt: the answer to `Place`."""

    placement: Placement
    turn: float | None = None
    """See `Submit.turn`."""


@value(frozen=True, slots=True)
class Delta:
    """A node's message about one attempt."""

    incarnation: str
    delta: RequestDelta


@value(frozen=True, slots=True)
class NodeGone:
    """A node's incarnation has ended, or does not answer any more."""

    incarnation: str
    reason: str
    lost_together: Set[str] = frozenset()
    """The incarnations that the router lost within the same few seconds, this one included."""


@value(frozen=True, slots=True)
class LinkBack:
    """The stream to an incarnation was cut and is open again: the leg that runs there waits to be adopted."""

    incarnation: str


@value(frozen=True, slots=True)
class MoveTo:
    """Let this node continue the stream, which is taken from the node that decodes it as soon as its KV is there."""

    node: NodeDescription
    most_tokens: int
    """So many further tokens it may have by then."""


@value(frozen=True, slots=True)
class StopMove:
    """The stream has not moved in time: it stays where it is."""

    to: AttemptKey
    reason: str


@value(frozen=True, slots=True)
class StopStringFound:
    """The text of a sequence contains a stop string."""

    stop: str
    sequence_index: int = 0


@value(frozen=True, slots=True)
class Cancel:
    """The client closed its stream or cancelled the request."""

    reason: str


@value(frozen=True, slots=True)
class GiveUp:
    """The router ends the flight: its deadline passed, no node can serve it, its client does not read, shutdown."""

    error: BatonError


@value(frozen=True, slots=True)
class LeaveToOtherRouter:
    """This router shuts down: another one is to continue the attempt, which its nodes keep running."""

    error: BatonError


FlightEvent: TypeAlias = (
    Placed | Delta | NodeGone | LinkBack | MoveTo | StopMove | StopStringFound | Cancel | GiveUp | LeaveToOtherRouter
)


class AttemptCause(enum.Enum):
    """Why an attempt was made; operators see the value."""

    FIRST = "first"
    NODE_LOST = "node_lost"
    KV_LOST = "kv_lost"
    REFUSED = "refused"
    ADAPTER_UNAVAILABLE = "adapter_unavailable"
    GIVEN_UP = "given_up"
    """A node aborted the attempt before."""
    RESUMED = "resumed"
    """The client came back, and the nodes of the attempt before are gone."""
    NOT_KEPT = "not_kept"
    """The attempt before was to be adopted, but its node has nothing of it."""
    MOVED = "moved"
    """The stream was moved to another node, and nothing was computed again."""


@value(frozen=True, slots=True)
class Place:
    """Choose nodes for this attempt; avoid the incarnations in `exclude`."""

    attempt: int
    exclude: frozenset[str]
    cause: AttemptCause = AttemptCause.FIRST
    origin: Origin | None = None
    """Where the stream began, if its client has tokens: only nodes that it allows may continue it."""

    @property
    def is_retry(self) -> bool:
        """Whether nodes may have computed something of the request already, so that it waits until they are back."""
        return self.attempt > 1 or self.origin is not None


@value(frozen=True, slots=True)
class SubmitLeg:
    """Send a leg to a node."""

    incarnation: str
    submit: Submit


@value(frozen=True, slots=True)
class AdoptLeg:
    """Tell a node that this flight continues an attempt that another router began, or this one on an earlier stream."""

    incarnation: str
    adopt: Adopt
    num_sequences: int


@value(frozen=True, slots=True)
class AbortLeg:
    """Tell a node that the attempt, or one sequence of it, is over."""

    incarnation: str
    abort: Abort


@value(frozen=True, slots=True)
class MoveStream:
    """Tell a node to hand a stream over to another one."""

    incarnation: str
    move: MoveOut


@value(frozen=True, slots=True)
class MoveEnded:
    """A move has ended."""

    to: AttemptKey
    placement: Placement | None
    """The nodes of the attempt that continues the stream; None: it stays where it is."""
    why: str = ""
    """Why it stays there; empty: it has moved, or its request is over."""


@value(frozen=True, slots=True)
class LegEnded:
    """The node does not have this leg any more: it does not count towards the node's load from now on."""

    incarnation: str
    attempt: AttemptKey


@value(frozen=True, slots=True)
class EmitPromptLogprobs:
    """Give the client the log-probabilities of the prompt's tokens from the second one on; before all tokens."""

    positions: Sequence[TokenLogprobs]


@value(frozen=True, slots=True)
class EmitTokens:
    """Give these tokens to the client."""

    first_index: int
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs]
    ends_with_stop_token: bool
    """Whether the last token is a stop token, which is not part of the text."""
    sequence_index: int = 0

    def divided(self, cuts: Sequence[int]) -> list[EmitTokens]:
        """The same tokens in pieces, which are cut before these places."""
        count = len(self.token_ids)
        return [
            replace(
                self,
                first_index=self.first_index + first,
                token_ids=self.token_ids[first:last],
                logprobs=self.logprobs[first:last],
                ends_with_stop_token=self.ends_with_stop_token and last == count,
            )
            for first, last in zip([0, *cuts], [*cuts, count], strict=True)
        ]


@value(frozen=True, slots=True)
class SequenceEnded:
    """One of several sequences ended well. A flight of one sequence returns only `Finish`."""

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
    """The embedding of the prompt, for a request that wants one (float32, little-endian)."""
    bit_exact: bool = True
    """See `Finished.bit_exact`."""


@value(frozen=True, slots=True)
class Fail:
    """The flight ended with this error."""

    error: BatonError


@value(frozen=True, slots=True)
class MovedAway:
    """Another router continues the flight; here it ends with this error."""

    error: BatonError


FlightEffect: TypeAlias = (
    Place
    | SubmitLeg
    | AdoptLeg
    | AbortLeg
    | MoveStream
    | MoveEnded
    | LegEnded
    | EmitPromptLogprobs
    | EmitTokens
    | SequenceEnded
    | Finish
    | Fail
    | MovedAway
)
