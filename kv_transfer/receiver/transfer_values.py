"""The states of a transfer on its receiver, and what a transfer book is given and answers: plans, effects, figures."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from baton.errors import TransferCause
from baton.messages.ids import AttemptKey, Peer
from baton.metric import Metric
from baton.observe.metrics import Histogram
from kv_transfer.effects import Recorded, Released
from kv_transfer.link.link_messages import Closing, ReaderMessage
from kv_transfer.piece_plan import ReadRange


class TransferState(enum.Enum):
    """The states of a transfer: how far a prompt's KV has come."""

    PLANNED = enum.auto()
    """The sender is known; the link to it is being opened."""
    RESERVED = enum.auto()
    """Blocks for the whole prompt are reserved here and the sender was asked for the offer."""
    READING = enum.auto()
    """Some blocks were offered; they are being read, or were."""
    CONFIRMING = enum.auto()
    """Everything is read; the sender was asked whether it held its lease."""
    QUARANTINED = enum.auto()
    """The transfer is over, but reads may still write to its blocks."""
    ARRIVED = enum.auto()
    """The KV is here and proven."""
    FAILED = enum.auto()
    """The KV will not come, and no read writes any more."""
    ABANDONED = enum.auto()
    """Nobody wanted the KV any more, and no read writes any more."""


class TransferEvent(enum.Enum):
    """What can happen to a transfer, and who reports it."""

    SUBSCRIBED = enum.auto()
    """Reported by the book: the sender was asked for the blocks."""
    OFFER = enum.auto()
    """Reported by the sender: some blocks are computed."""
    READ_DONE = enum.auto()
    """Reported by the mover: all bytes of one read are here."""
    ALL_READ = enum.auto()
    """Reported by the book: everything was offered, and all reads are done."""
    HELD = enum.auto()
    """Reported by the sender: it held its lease through all reads."""
    FAIL = enum.auto()
    """Reported by the sender, the link, the mover or the book: the KV will not come, and no read is in flight."""
    FAIL_READING = enum.auto()
    """Reported like FAIL, while reads are in flight."""
    ABANDON = enum.auto()
    """Reported by the engine or the router: nobody wants the KV any more, and no read is in flight."""
    ABANDON_READING = enum.auto()
    """Reported like ABANDON, while reads are in flight."""
    READS_ENDED_FAILED = enum.auto()
    """Reported by the mover: the last read of a transfer that failed has ended."""
    READS_ENDED_ABANDONED = enum.auto()
    """Reported by the mover: the last read of a transfer that was abandoned has ended."""


TRANSFER_TABLE: dict[tuple[TransferState, TransferEvent], TransferState] = {
    (TransferState.PLANNED, TransferEvent.SUBSCRIBED): TransferState.RESERVED,
    (TransferState.PLANNED, TransferEvent.FAIL): TransferState.FAILED,
    (TransferState.PLANNED, TransferEvent.ABANDON): TransferState.ABANDONED,
    (TransferState.RESERVED, TransferEvent.OFFER): TransferState.READING,
    (TransferState.RESERVED, TransferEvent.FAIL): TransferState.FAILED,
    (TransferState.RESERVED, TransferEvent.ABANDON): TransferState.ABANDONED,
    (TransferState.READING, TransferEvent.OFFER): TransferState.READING,
    (TransferState.READING, TransferEvent.READ_DONE): TransferState.READING,
    (TransferState.READING, TransferEvent.ALL_READ): TransferState.CONFIRMING,
    (TransferState.READING, TransferEvent.FAIL): TransferState.FAILED,
    (TransferState.READING, TransferEvent.FAIL_READING): TransferState.QUARANTINED,
    (TransferState.READING, TransferEvent.ABANDON): TransferState.ABANDONED,
    (TransferState.READING, TransferEvent.ABANDON_READING): TransferState.QUARANTINED,
    (TransferState.CONFIRMING, TransferEvent.HELD): TransferState.ARRIVED,
    (TransferState.CONFIRMING, TransferEvent.FAIL): TransferState.FAILED,
    (TransferState.CONFIRMING, TransferEvent.ABANDON): TransferState.ABANDONED,
    (TransferState.QUARANTINED, TransferEvent.READ_DONE): TransferState.QUARANTINED,
    (TransferState.QUARANTINED, TransferEvent.READS_ENDED_FAILED): TransferState.FAILED,
    (TransferState.QUARANTINED, TransferEvent.READS_ENDED_ABANDONED): TransferState.ABANDONED,
}


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
    is_pull: bool = False
    """Whether these are the first tokens of a prompt, from the sender's prefix cache: no token comes with them."""
    num_known_tokens: int = 0
    """For a stream that is moved, which may have at most `num_prompt_tokens` by then, the last one without KV: how many
    of its tokens are known here. 0: it is a prompt, all of which is known."""


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
class AbandonRead:
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
    num_tokens: int = 0
    """How many tokens have KV when the sender begins, as `Begun` says."""


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
    | AbandonRead
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


READ_BUCKETS_S = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075),
    *(0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0),
)
"""Upper bounds in seconds. Those from 5 ms on are vLLM's; reads over shared memory take less than that."""
BYTES_BUCKETS = tuple(float(1 << power) for power in range(10, 34, 2))
DESCRIPTOR_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 400.0, 1000.0, 4000.0)
"""Upper bounds of the number of descriptors of one read; neighbouring blocks share one."""


@dataclass(slots=True)
class ReadHistograms:
    """Histograms of the reads from one sender that were done; failed reads are not counted.

    All of them are on the decode node's metrics page, with the sender as the label `peer`.
    """

    seconds: Annotated[Histogram, Metric("kv_transfer_seconds", "Durations of reads, on this node's clock.")] = field(
        default_factory=lambda: Histogram(READ_BUCKETS_S)
    )
    post_seconds: Annotated[
        Histogram, Metric("kv_transfer_post_seconds", "Time of reads that was spent on posting them.")
    ] = field(default_factory=lambda: Histogram(READ_BUCKETS_S))
    """The part of each read's duration that was spent in the backend's post calls."""
    num_bytes: Annotated[Histogram, Metric("kv_transfer_bytes", "Bytes of each read.")] = field(
        default_factory=lambda: Histogram(BYTES_BUCKETS)
    )
    descriptors: Annotated[
        Histogram, Metric("kv_transfer_descriptors", "Descriptors that were posted for each read.")
    ] = field(default_factory=lambda: Histogram(DESCRIPTOR_BUCKETS))

    def add(self, num_bytes: int, num_descriptors: int, read_s: float, post_s: float) -> None:
        """Count one read that is done. `num_descriptors`: descriptors; `read_s` and `post_s`: seconds."""
        self.seconds.observe(read_s)
        self.post_seconds.observe(post_s)
        self.num_bytes.observe(num_bytes)
        self.descriptors.observe(num_descriptors)
