"""What a transfer book is given and what it answers: plans, effects, and figures about its transfers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.errors import TransferCause
from baton.messages.ids import AttemptKey
from baton.messages.node import KVSource
from kv_transfer.backends.base import ReadRange
from kv_transfer.effects import Recorded, Released
from kv_transfer.link.link_messages import Closing, ReaderMessage


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be filled: the whole prompt's blocks in prompt order; those before `first_block` are valid already.

    The null block stands where nothing is wanted: what a group of layers has left behind with its window.
    """

    attempt: AttemptKey
    source: KVSource
    num_prompt_tokens: int
    block_ids: Sequence[int]
    first_block: int


@dataclass(frozen=True, slots=True)
class TransferStats:
    """What one transfer moved and how long it took, in seconds on the receiver's clock."""

    num_bytes: int
    num_blocks: int
    read_s: float
    """Time that its reads took, added up; what passed between them belongs to the computation."""


@dataclass(frozen=True, slots=True)
class OpenLink:
    """Open a link to this sender; `peer_ready` or `peer_lost` answers."""

    source: KVSource


@dataclass(frozen=True, slots=True)
class ReopenLink:
    """Reads outlive their link, and may not move unless their sender knows of them: call `reopen` after a while."""

    source: KVSource


@dataclass(frozen=True, slots=True)
class TellSender:
    """Send a message on the link to this incarnation, if there still is one."""

    incarnation: str
    message: ReaderMessage


@dataclass(frozen=True, slots=True)
class StartRead:
    """Read these blocks; `read_done` or `read_failed` answers with the id.

    If it is done, `digested` answers for each local block of it that is in `to_digest`, or `not_digested`.
    """

    read_id: int
    incarnation: str
    ranges: Sequence[ReadRange]
    to_digest: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class CancelRead:
    """Nobody wants this read any more; `read_done` or `read_failed` still answers, when nothing of it writes."""

    read_id: int


@dataclass(frozen=True, slots=True)
class CutLink:
    """This sender can't be read any more: end the link, so that the next transfer begins with a new one."""

    incarnation: str
    reason: str


@dataclass(frozen=True, slots=True)
class MayPlan:
    """The sender computes this attempt: blocks may be reserved for it."""

    attempt: AttemptKey


@dataclass(frozen=True, slots=True)
class Arrived:
    """The prompt's KV is here and proven."""

    attempt: AttemptKey
    closing: Closing
    stats: TransferStats


@dataclass(frozen=True, slots=True)
class Failed:
    """The prompt's KV will not come."""

    attempt: AttemptKey
    cause: TransferCause
    story: str
    num_valid_blocks: int = 0
    """Leading blocks of the plan that hold the prompt's KV, proven (rule 8), those included that did before."""


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
    """Transfers that are not over, and blocks that wait for reads to end."""

    waiting_to_start: int
    """Nothing was offered yet."""
    in_progress: int
    quarantined: int
    quarantined_blocks: int

    @property
    def live(self) -> int:
        return self.waiting_to_start + self.in_progress
