"""What the two ends of a link say to each other, as plain values. `link_codec` turns them into Protocol Buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.errors import TransferCause
from baton.messages.ids import AttemptKey
from baton.messages.sampling import TokenLogprobs
from kv_transfer.layout import LayoutFingerprint


@dataclass(frozen=True, slots=True)
class LinkHello:
    """The reader's first message: who it is, and which incarnation it means."""

    protocol_version: int
    cluster: str
    node_id: str
    incarnation: str
    peer_incarnation: str
    layout: LayoutFingerprint
    address: str = ""
    """Where its process listens; empty: it does not say."""


@dataclass(frozen=True, slots=True)
class LinkWelcome:
    """The sender's first message: who it is and where its blocks lie."""

    node_id: str
    incarnation: str
    layout: LayoutFingerprint
    agent_metadata: bytes
    base_address: int
    num_blocks: int
    memory_kind: str
    device_id: int
    heartbeat_ms: int


@dataclass(frozen=True, slots=True)
class Expect:
    """Reader: I am to take this attempt in, and reserve blocks when you say that it has `Begun`."""

    attempt: AttemptKey


@dataclass(frozen=True, slots=True)
class Subscribe:
    """Reader: tell me the blocks of this attempt, from prompt block `first_block` on."""

    attempt: AttemptKey
    first_block: int


@dataclass(frozen=True, slots=True)
class ReadProgress:
    """Reader: so many blocks, from the subscription's first on, have been read."""

    attempt: AttemptKey
    blocks_read: int


@dataclass(frozen=True, slots=True)
class ConfirmRead:
    """Reader: all reads are done; was the lease held through them?"""

    attempt: AttemptKey


@dataclass(frozen=True, slots=True)
class ConfirmPart:
    """Reader: I have read the prompt's blocks before `end_block`; was the lease held, and what are their digests?"""

    attempt: AttemptKey
    end_block: int


@dataclass(frozen=True, slots=True)
class Abandon:
    """Reader: I no longer want it. With `reads_in_flight` a second one follows when they have ended."""

    attempt: AttemptKey
    reads_in_flight: bool


@dataclass(frozen=True, slots=True)
class Closing:
    """Part of the last offer: the prompt is computed."""

    num_prompt_tokens: int
    first_token_ids: Sequence[int]
    ended: bool
    """The request ended with its first token: nothing is left to decode."""
    first_logprobs: Sequence[TokenLogprobs] = ()
    """One for each first token, where the request asked for them."""


@dataclass(frozen=True, slots=True)
class Begun:
    """Sender: this attempt has all the blocks here that it needs; nothing that you do can keep it from its end."""

    attempt: AttemptKey


@dataclass(frozen=True, slots=True)
class Offer:
    """Sender: prompt blocks from `first_block` on lie in these blocks of mine, until the lease ends."""

    attempt: AttemptKey
    first_block: int
    block_ids: Sequence[int]
    lease_ms: int
    closing: Closing | None = None
    digest_every: int = 0
    """The answer to `ConfirmRead` brings digests of one block in so many (`sampling.is_digested`); 0: of none."""

    @property
    def end_block(self) -> int:
        """The prompt block after the last one that is offered."""
        return self.first_block + len(self.block_ids)


@dataclass(frozen=True, slots=True)
class ReadConfirmed:
    """Sender: the lease was held through the reads, or it was not. Either way it is over."""

    attempt: AttemptKey
    held: bool
    digests: Sequence[int] = ()
    """Of the blocks' bytes, one for each from the subscription's first on; 0 for those that have none."""


@dataclass(frozen=True, slots=True)
class PartConfirmed:
    """Sender: the lease is held, as it was through all reads that `ConfirmPart` asked about; it is not over."""

    attempt: AttemptKey
    first_block: int
    """The prompt block whose digest is the first: the subscription's first, then where the last such message ended."""
    digests: Sequence[int]
    """As in `ReadConfirmed`."""


@dataclass(frozen=True, slots=True)
class OfferLost:
    """Sender: I can't (any longer) provide it."""

    attempt: AttemptKey
    story: str
    cause: TransferCause = TransferCause.LEASE_LOST


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Either side: I live. The reader's renews all its leases."""

    seq: int


def request_of(message: ReaderMessage | SenderMessage) -> str:
    """The id of the request that it is about, if it is about one."""
    return "" if isinstance(message, Heartbeat) else message.attempt.request_id


ReaderMessage = Expect | Subscribe | ReadProgress | ConfirmPart | ConfirmRead | Abandon | Heartbeat
SenderMessage = Begun | Offer | PartConfirmed | ReadConfirmed | OfferLost | Heartbeat
