"""The messages of a link, as plain values. The codec beside it turns them into Protocol Buffers.

All of them count the sender's blocks, as they are in the table of a prompt: for each `block_size` tokens of the sender
one block of every group of layers, in the order of the groups. A reader whose blocks have another size converts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from baton.engine.runner import KVLayout
from baton.errors import TransferCause
from baton.messages.ids import AttemptKey
from baton.messages.node import StageTimings
from baton.messages.node_report import ProbeFault
from baton.messages.sampling import TokenLogprobs
from kv_transfer.backends.base import PeerMemory
from kv_transfer.layout import LayoutFingerprint, LinkIdentity, PeerNode, part_name


@dataclass(frozen=True, slots=True)
class LinkHello:
    """The reader's first message: who it is, and which incarnation of the sender it wants to reach."""

    protocol_version: int
    cluster: str
    node_id: str
    incarnation: str
    peer_incarnation: str
    layout: LayoutFingerprint
    address: str = ""
    """Where the reader's process listens, as HOST:PORT; empty: unknown."""


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """One of a sender's memories, which holds some layers of each block. It has an agent of its own."""

    layers: range
    agent_metadata: bytes
    base_address: int
    memory_kind: str
    device_id: int


@dataclass(frozen=True, slots=True)
class LinkWelcome:
    """The sender's first message: who it is, and where its blocks are in memory."""

    node_id: str
    incarnation: str
    layout: LayoutFingerprint
    agent_metadata: bytes
    base_address: int
    num_blocks: int
    memory_kind: str
    device_id: int
    heartbeat_ms: int
    num_probe_blocks: int = 0
    """Number of probe blocks behind the `num_blocks` of the cache."""
    layers: range | None = None
    """The layers that this memory holds of each block; None: all of them."""
    other_parts: Sequence[MemoryPart] = ()
    """The memories that hold the other layers of the same blocks, in the order of the layers."""
    takes_pulls: bool = False
    """Whether it understands `Pull`; False: an earlier version."""


@dataclass(frozen=True, slots=True)
class AskProbe:
    """Reader: put known bytes into a probe block for me, since I have not read your memory yet."""

    probe: int
    """Chosen by the reader; the answers repeat it."""
    group: int = 0
    """The group of layers as a block of which the known bytes are read."""


@dataclass(frozen=True, slots=True)
class ProbeReady:
    """Sender: the known bytes are in this block of mine."""

    probe: int
    block: int
    digest: int
    """Digest of the last part of the known bytes, which has the smaller of the two block sizes."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Reader: this is how the probe ended. Unless it passed, the sender ends the link."""

    probe: int
    digest: int
    """Digest of the bytes that were read; 0 if there are none."""
    fault: ProbeFault | None = None
    """None: the bytes are the known ones."""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Expect:
    """Reader: I will decode this attempt, and reserve blocks for it when you say that it has `Begun`."""

    attempt: AttemptKey


@dataclass(frozen=True, slots=True)
class Subscribe:
    """Reader: offer me the blocks of this attempt, from prompt block `first_block` on."""

    attempt: AttemptKey
    first_block: int


@dataclass(frozen=True, slots=True)
class Pull:
    """Reader: I will read what you have cached under these keys, and reserve blocks for what you say has `Begun`."""

    attempt: AttemptKey
    keys: Sequence[bytes]
    """One for each `block_size` tokens of the prompt, from its beginning on (`baton.engine.kv_cache.block_hash`)."""


@dataclass(frozen=True, slots=True)
class ReadProgress:
    """Reader: I have read so many blocks, from the subscription's first on."""

    attempt: AttemptKey
    blocks_read: int


@dataclass(frozen=True, slots=True)
class ConfirmRead:
    """Reader: all my reads are done; did you hold the lease through them?"""

    attempt: AttemptKey


@dataclass(frozen=True, slots=True)
class ConfirmPart:
    """Reader: I have read the prompt blocks before `end_block`; did you hold the lease, and what are their digests?"""

    attempt: AttemptKey
    end_block: int


@dataclass(frozen=True, slots=True)
class Abandon:
    """Reader: I no longer want this attempt. With `reads_in_flight`, a second one follows when those have ended."""

    attempt: AttemptKey
    reads_in_flight: bool


@dataclass(frozen=True, slots=True)
class Closing:
    """Part of the last offer: the prompt is computed, or what was pulled is offered."""

    num_prompt_tokens: int
    """So many tokens have KV; those of a stream that is moved may have been generated."""
    first_token_ids: Sequence[int]
    """The tokens behind those that the reader was submitted with, of which the last one has no KV. Empty for what was
    pulled."""
    ended: bool
    """The request ended with its first token: nothing is left to decode."""
    first_logprobs: Sequence[TokenLogprobs] = ()
    """One for each first token, where the request asked for them."""
    prompt_timings: StageTimings | None = None
    """What the sender measured of the attempt; None: its version does not say it."""


@dataclass(frozen=True, slots=True)
class Begun:
    """Sender: this attempt has all the blocks that it needs here, so it will be computed whatever you do."""

    attempt: AttemptKey
    num_tokens: int = 0
    """For `Pull`: how many of the prompt's first tokens have blocks here, which are kept. For a stream that is moved:
    how many of its tokens have KV here."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Sender: the prompt blocks from `first_block` on are in these blocks of mine, until the lease ends."""

    attempt: AttemptKey
    first_block: int
    block_ids: Sequence[int]
    lease_ms: int
    closing: Closing | None = None
    digest_every: int = 0
    """The answer to `ConfirmRead` has digests of one block in so many (`is_digested`); 0: of none."""
    digest_parts: int = 1
    """How many digests it has for each block: one for each of so many equal parts of its tokens. All offers of an
    attempt have the same number."""

    @property
    def end_block(self) -> int:
        """The prompt block after the last one that is offered."""
        return self.first_block + len(self.block_ids)


@dataclass(frozen=True, slots=True)
class ReadConfirmed:
    """Sender: I held the lease through the reads, or I did not. Either way it is over."""

    attempt: AttemptKey
    held: bool
    digests: Sequence[int] = ()
    """Digests of the bytes of the blocks from the subscription's first on, `Offer.digest_parts` for each; 0 in place of
    those of a block that has none."""


@dataclass(frozen=True, slots=True)
class PartConfirmed:
    """Sender: I hold the lease, as I did through all reads that `ConfirmPart` asked about; it is not over."""

    attempt: AttemptKey
    first_block: int
    """The prompt block of the first digest: the subscription's first, later the one where the last message ended."""
    digests: Sequence[int]
    """As in `ReadConfirmed`."""


@dataclass(frozen=True, slots=True)
class OfferLost:
    """Sender: I can't provide this attempt's KV, or not any longer."""

    attempt: AttemptKey
    story: str
    cause: TransferCause = TransferCause.LEASE_LOST


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Either side: I live. A reader's heartbeat renews all its leases."""

    seq: int


def request_of(message: ReaderMessage | SenderMessage) -> str:
    """The id of the request that the message is about; empty for a message about none."""
    return "" if isinstance(message, Heartbeat | ProbeMessage) else message.attempt.request_id


ProbeMessage = AskProbe | ProbeReady | ProbeResult
LeaseMessage = Expect | Subscribe | ReadProgress | ConfirmPart | ConfirmRead | Abandon | Heartbeat
"""A reader's message about its leases."""
OfferMessage = Begun | Offer | PartConfirmed | ReadConfirmed | OfferLost | Heartbeat
"""A sender's message about what it offers."""
ReaderMessage = LeaseMessage | Pull | AskProbe | ProbeResult
SenderMessage = OfferMessage | ProbeReady


SAMPLE_EVERY = 16
"""Where a sample is compared, it is one block in so many."""


def is_digested(attempt: AttemptKey, index: int, every: int) -> bool:
    """Whether the prompt's block `index` has a digest, where one block in `every` has; 0: none has.

    Each flight compares other blocks, so that in the end all blocks of a prefix that many requests share are compared.
    """
    return every > 0 and (index + attempt.flight) % every == 0


def welcome_of(identity: LinkIdentity, node: PeerNode, heartbeat_ms: int) -> LinkWelcome:
    """The welcome of a sender with these memories."""
    first, *others = node.parts
    return LinkWelcome(
        node_id=identity.node_id,
        incarnation=identity.incarnation,
        layout=identity.layout,
        agent_metadata=first.agent_metadata,
        base_address=first.base_address,
        num_blocks=first.num_blocks,
        memory_kind=first.kind,
        device_id=first.device_id,
        num_probe_blocks=first.num_probe_blocks,
        heartbeat_ms=heartbeat_ms,
        layers=first.layers,
        takes_pulls=True,
        other_parts=[
            # A memory of all layers has no others beside it.
            MemoryPart(part.layers or range(0), part.agent_metadata, part.base_address, part.kind, part.device_id)
            for part in others
        ],
    )


def sender_of(welcome: LinkWelcome, layout: KVLayout | None) -> PeerNode:
    """The sender that sent a welcome. `layout`: of the reader's blocks, from which the sender's differ in nothing but
    their size; None: it is not known.

    Nothing but the number of its parts is checked here: `PartsMover.connect` refuses what does not fit.
    """
    theirs = replace(layout, block_size=welcome.layout.block_size) if layout is not None else None

    def block_bytes(layers: range | None) -> int:
        return welcome.layout.block_bytes if theirs is None or layers is None else theirs.part(layers).block_bytes

    first = PeerMemory(
        incarnation=welcome.incarnation,
        agent_metadata=welcome.agent_metadata,
        base_address=welcome.base_address,
        num_blocks=welcome.num_blocks,
        block_bytes=block_bytes(welcome.layers),
        kind=welcome.memory_kind,
        device_id=welcome.device_id,
        num_probe_blocks=welcome.num_probe_blocks,
        block_size=welcome.layout.block_size,
        layers=welcome.layers,
    )
    others = (
        replace(
            first,
            incarnation=part_name(welcome.incarnation, number),
            agent_metadata=part.agent_metadata,
            base_address=part.base_address,
            block_bytes=block_bytes(part.layers),
            kind=part.memory_kind,
            device_id=part.device_id,
            layers=part.layers,
        )
        for number, part in enumerate(welcome.other_parts, 1)
    )
    return PeerNode(welcome.incarnation, (first, *others))
