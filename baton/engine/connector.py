"""The interface between the scheduler and the code that transfers KV between nodes. Names follow vLLM's KVConnector.

Every method is called from the engine's own thread, returns at once and never raises because of a peer: the results of
transfers are reported through `Scheduler.update_from_kv_transfer`. The scheduler owns the blocks. A connector learns
which they are and, when a request ends, says whether a peer or a transfer may still access them.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Protocol

from baton.engine.request import Request
from baton.errors import TransferCause
from baton.messages.ids import AttemptKey
from baton.messages.sampling import TokenLogprobs
from baton.values import value


@value(frozen=True, slots=True)
class ExternalTokens:
    """How many tokens of a prompt have KV on another node, beyond those that are cached here.

    `num_tokens` None means: not known yet, the scheduler asks again in a later step.
    """

    num_tokens: int | None
    load_async: bool = False
    """The request must wait in WAITING_FOR_REMOTE_KVS until the transfer reports."""
    seen_from: int = 0
    """`Request.seen_from` of a stream that is moved here; 0: none is."""


NO_EXTERNAL_TOKENS = ExternalTokens(0)


class BlockFate(enum.Enum):
    """What happens to the blocks of a request that ended."""

    FREE = "free"
    """The blocks are freed at once."""
    LEASED = "leased"
    """A peer may read the blocks: they are kept until `KVTransferOutput.released` names the request."""
    QUARANTINED = "quarantined"
    """A read in flight may still write to the blocks: kept until `KVTransferOutput.released` names the request."""


@value(frozen=True, slots=True)
class ArrivedKV:
    """The KV of a decode leg's prompt has arrived and is verified, and the token after the prompt is known; or the KV
    of those first tokens of a prompt that another leg has pulled."""

    first_token_ids: Sequence[int]
    """The output tokens behind the submitted ones, which count as generated. There is KV of all but the last one. A
    prefill node samples one; a stream that is moved may have more. Empty for what was pulled."""
    first_logprobs: Sequence[TokenLogprobs] = ()
    """Log-probabilities for each of the first tokens, where the request asked for them."""
    partly_filled: Sequence[int] = ()
    """Indices of blocks, among those that `update_state_after_alloc` named, whose first tokens were not read: no query
    from the last prompt token on sees them. Other requests can't use these blocks."""


@value(frozen=True, slots=True)
class LostKV:
    """A prompt's KV will not arrive completely, or its transfer was never begun."""

    cause: TransferCause
    detail: str
    """What happened, for people."""
    num_valid_blocks: int = 0
    """How many leading blocks of those that `update_state_after_alloc` named hold the prompt's KV nevertheless: cache
    hits, and blocks that were read completely and match the sender's digests. Nothing writes to them any more. A null
    block counts as valid, since nothing was to be read there; so a group of layers with a window may lack blocks that a
    query right behind the valid blocks attends to."""
    partly_filled: Sequence[int] = ()
    """The same as in `ArrivedKV`; some of the valid blocks may be among them."""


@value(frozen=True, slots=True)
class Pin:
    """What a reader wants to pull from the prefix cache: its blocks are to be kept while it reads them."""

    attempt: AttemptKey
    """The reader's attempt, whose own request is on another node."""
    keys: Sequence[bytes]
    """One for each stripe of blocks, from the beginning of the prompt on."""

    @property
    def holder(self) -> str:
        """The id under which the blocks are kept. No request has it: an attempt may have a request here, too."""
        return f"pull {self.attempt}"


@value(frozen=True, slots=True)
class KVTransferOutput:
    """Reports of KV transfers to the scheduler, which skips and counts unknown request ids."""

    arrived: Mapping[str, ArrivedKV] = field(default_factory=dict)
    failed: Mapping[str, LostKV] = field(default_factory=dict)
    """Requests whose transfer failed. Their quarantined blocks stay in quarantine until `released` names them."""
    released: frozenset[str] = frozenset()
    """Requests and pins whose leased or quarantined blocks no peer or transfer accesses any more."""
    pins: Sequence[Pin] = ()
    """Cached blocks that are to be kept until `released` names the pin; `KVConnector.pinned` answers each."""
    moves_ended: Sequence[AttemptKey] = ()
    """Attempts (`MoveOut.to`) to which a stream is not moved any more: it goes on here."""


class KVConnector(Protocol):
    """Transfers KV between nodes: the prefill node's implementation offers blocks, the decode node's reads them.

    Here, as in all of `kv_transfer`, a prompt means all submitted tokens: behind the prompt tokens there may be tokens
    that an earlier attempt generated (`Request.num_submitted_tokens`). The block ids that a connector receives are
    those of the prompt: for each `block_size` tokens one block of every group of layers, in the order of the groups.
    The null block stands where a query behind the end of the prompt sees nothing any more.
    """

    def request_added(self, request: Request) -> None:
        """A request was submitted. It may wait for long before another method is called for it."""
        ...

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> ExternalTokens:
        """How many tokens behind the first `num_computed_tokens` (local cache hits) have KV on another node.

        For a decode leg these are all tokens. Another leg may pull the first ones in whole blocks, if its router has
        named a node that has more of them cached (`Request.held_prefix`).

        The answer is "not known yet" until the other node has begun to compute the prompt, or keeps what is pulled. If
        blocks were reserved earlier, two nodes could deadlock: each one's reserved blocks could be those that the other
        one's prompt needs.
        """
        ...

    def update_state_after_alloc(self, request: Request, block_ids: Sequence[int], num_external_tokens: int) -> None:
        """Blocks for the whole prompt, or for what is pulled of it, are reserved, in prompt order; the last ones are to
        be filled from another node.

        `num_external_tokens`: how many tokens are to be filled. The blocks before them came from the local cache and
        must not be written. For a prefill leg it is 0, and the call says that its computation begins.
        """
        ...

    def blocks_computed(self, request: Request, block_ids: Sequence[int], num_computed_tokens: int) -> None:
        """A step was committed: the first `num_computed_tokens` tokens of the request have KV in `block_ids`.

        Called for a prefill leg, and for a stream that is moved.
        """
        ...

    def move_begun(self, request: Request) -> None:
        """A running request has been told to move (`Request.move`)."""
        ...

    def move_ended(self, request_id: str, to: AttemptKey, why: str) -> None:
        """A move has ended, or can't begin, and its request, if there is one, goes on here."""
        ...

    def may_cut(self, request: Request) -> bool:
        """Whether the node to which a request is moved has read nearly all of its KV, so that it may end HANDED_OFF."""
        ...

    def load_failed(self, request: Request, block_ids: Sequence[int]) -> BlockFate:
        """A load into these blocks is over and the request is computed here, behind what it brought."""
        ...

    def pinned(self, pin: Pin, block_ids: Sequence[int]) -> None:
        """The cached blocks of a pin, for its first keys one of every group of layers each; empty: nothing is kept."""
        ...

    def request_finished(self, request: Request, block_ids: Sequence[int], transferring: bool) -> BlockFate:
        """The request ended with these blocks. `transferring`: a transfer into them was started and has not reported.

        For the prefill leg it is called with the first token already in `request.output_token_ids`, and with its
        log-probabilities in `request.last_logprobs`; for a stream that was moved with all of its tokens.
        """
        ...


class NullConnector:
    """The connector of an engine that exchanges no KV with other nodes."""

    def request_added(self, request: Request) -> None:
        return

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> ExternalTokens:
        return NO_EXTERNAL_TOKENS

    def update_state_after_alloc(self, request: Request, block_ids: Sequence[int], num_external_tokens: int) -> None:
        if num_external_tokens:
            raise RuntimeError("no external tokens were promised")

    def blocks_computed(self, request: Request, block_ids: Sequence[int], num_computed_tokens: int) -> None:
        return

    def move_begun(self, request: Request) -> None:
        raise RuntimeError("nothing is moved from here")

    def move_ended(self, request_id: str, to: AttemptKey, why: str) -> None:
        return

    def may_cut(self, request: Request) -> bool:
        return False

    def load_failed(self, request: Request, block_ids: Sequence[int]) -> BlockFate:
        return BlockFate.FREE

    def pinned(self, pin: Pin, block_ids: Sequence[int]) -> None:
        return

    def request_finished(self, request: Request, block_ids: Sequence[int], transferring: bool) -> BlockFate:
        return BlockFate.FREE
