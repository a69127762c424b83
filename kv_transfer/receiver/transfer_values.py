"""What a transfer book is given and what it answers: plans, effects, and figures about its transfers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.errors import TransferCause
from baton.messages.ids import AttemptKey, Peer
from kv_transfer.effects import Recorded, Released
from kv_transfer.link.link_messages import Closing, ReaderMessage
from kv_transfer.piece_plan import ReadRange


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """The blocks that a transfer is to fill."""

    attempt: AttemptKey
    source: Peer
    num_prompt_tokens: int
    block_ids: Sequence[int]
    """This node's blocks for the whole prompt, in prompt order. The null block stands where no KV is wanted, because a
    group of layers has left it behind with its window."""
    first_block: int
    """The prompt blocks before this one hold their KV already."""


@dataclass(frozen=True, slots=True)
class TransferStats:
    """How much one transfer moved and how long its reads took."""

    num_bytes: int
    num_blocks: int
    """Blocks of the sender."""
    read_s: float
    """Durations of the reads, added up, in seconds on the receiver's clock. The time between two reads, in which the
    sender computes, is not part of it."""


@dataclass(frozen=True, slots=True)
class OpenLink:
    """Open a link to this sender; `peer_ready` or `peer_lost` answers."""

    source: Peer


@dataclass(frozen=True, slots=True)
class ReopenLink:
    """Call `reopen` after a while: reads are still in flight, but their link has ended, and they may only make progress
    while their sender knows of them."""

    source: Peer


@dataclass(frozen=True, slots=True)
class TellSender:
    """Send a message on the link to this incarnation, if there still is one."""

    incarnation: str
    message: ReaderMessage


@dataclass(frozen=True, slots=True)
class StartRead:
    """Read these sub-blocks; `read_done` or `read_failed` answers with the id.

    After `read_done`, or before it, `digested` answers for each local sub-block in `to_digest`, or `digests_failed`
    does. Of these sub-blocks, which may be smaller, a local block has `digest_parts`.
    """

    read_id: int
    incarnation: str
    ranges: Sequence[ReadRange]
    to_digest: Sequence[int] = ()
    digest_parts: int = 1


@dataclass(frozen=True, slots=True)
class CancelRead:
    """Start no more of this read; `read_done` or `read_failed` answers once none of it writes any more."""

    read_id: int


@dataclass(frozen=True, slots=True)
class CutLink:
    """End the link to this sender, which can't be read any more, so that the next transfer opens a new one."""

    incarnation: str
    reason: str


@dataclass(frozen=True, slots=True)
class MayPlan:
    """Blocks may be reserved for this attempt, since the sender has begun to compute it."""

    attempt: AttemptKey


@dataclass(frozen=True, slots=True)
class Arrived:
    """The prompt's KV is here and proven."""

    attempt: AttemptKey
    closing: Closing
    stats: TransferStats
    partly_filled: Sequence[int] = ()
    """Indices of the plan's blocks whose first tokens were not read, since windows have passed them."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The prompt's KV will not come."""

    attempt: AttemptKey
    cause: TransferCause
    detail: str
    num_valid_blocks: int = 0
    """How many leading blocks of the plan hold proven KV all the same (rule 8 of `transfer`), those before the plan's
    `first_block` included."""
    partly_filled: Sequence[int] = ()
    """The same as in `Arrived`; some of the valid blocks may be among them."""


TransferEffect = (
    OpenLink
    | ReopenLink
    | TellSender
    | StartRead
    | CancelRead
    | CutLink
    | MayPlan
    | Arrived
    | Failed
    | Released
    | Recorded
)


@dataclass(frozen=True, slots=True)
class TransferCounts:
    """Number of transfers that are not over, by progress, and of blocks that wait for reads to end."""

    waiting_to_start: int
    """Transfers of which no block was offered yet."""
    in_progress: int
    quarantined: int
    quarantined_blocks: int

    @property
    def live(self) -> int:
        """Transfers that may still arrive."""
        return self.waiting_to_start + self.in_progress
