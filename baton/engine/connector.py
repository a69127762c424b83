"""The seam between the scheduler and whatever moves KV between nodes. Names follow vLLM's KVConnector.

Every method is called from the engine's own thread, returns at once and never raises for what a peer did: outcomes
come back through `Scheduler.update_from_kv_transfer`. The scheduler keeps the blocks; a connector only learns which
they are and, when a request ends, says who may still touch them.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Protocol

from baton.engine.request import Request
from baton.errors import TransferCause
from baton.messages.sampling import TokenLogprobs
from baton.values import value


@value(frozen=True, slots=True)
class ExternalTokens:
    """How much of a prompt's KV can be had from elsewhere, beyond what is cached here.

    `num_tokens` None means: not known yet, ask again in a later step.
    """

    num_tokens: int | None
    load_async: bool = False
    """The request must wait in WAITING_FOR_REMOTE_KVS until the transfer reports."""


NO_EXTERNAL_TOKENS = ExternalTokens(0)


class BlockFate(enum.Enum):
    """What happens to the blocks of a request that ended."""

    FREE = "free"
    """Nobody else touches them."""
    LEASED = "leased"
    """A peer may read them: kept until `KVTransferOutput.released` names the request."""
    QUARANTINED = "quarantined"
    """A read in flight may still write to them: kept until `KVTransferOutput.released` names the request."""


@value(frozen=True, slots=True)
class ArrivedKV:
    """A prompt's KV is here, verified, and the token after it is known."""

    first_token_ids: Sequence[int]
    """Output tokens that the prefill node sampled (one); they count as generated, their KV is not computed yet."""
    first_logprobs: Sequence[TokenLogprobs] = ()
    """One for each of them, where the request asked for them."""


@value(frozen=True, slots=True)
class LostKV:
    """A prompt's KV does not come, or will not even begin to."""

    cause: TransferCause
    story: str
    num_valid_blocks: int = 0
    """So many leading blocks of those that `update_state_after_alloc` named hold the prompt's KV all the same: they
    did before, or were read to the end and compared with what the sender computed. Nothing writes to them any more. A
    null block among them counts, since nothing was wanted there; so a group of layers with a window may lack what a
    query right behind them sees."""


@value(frozen=True, slots=True)
class KVTransferOutput:
    """What the transfer side has to tell the scheduler; unknown request ids are skipped and counted."""

    arrived: Mapping[str, ArrivedKV] = field(default_factory=dict)
    failed: Mapping[str, LostKV] = field(default_factory=dict)
    """Transfers that did not bring all. Quarantined blocks stay so until `released`."""
    released: frozenset[str] = frozenset()
    """Requests whose leased or quarantined blocks nobody touches any more."""


class KVConnector(Protocol):
    """Implemented by the prefill node (it offers) and by the decode node (it takes in).

    A prompt is, here as in all of `kv_transfer`, all that a request came with: behind its prompt tokens there may be
    some that it generated elsewhere (`Request.num_submitted_tokens`). The blocks that a connector is told of are those
    of the prompt: for each block of its tokens one of every group of layers, in the order of the groups; the null block
    where whoever goes on from the end of the prompt sees nothing any more.
    """

    def request_added(self, request: Request) -> None:
        """A request has come; it may have to wait long before anything else is asked for it."""
        ...

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> ExternalTokens:
        """KV that exists elsewhere for `request` beyond its first `num_computed_tokens` (local cache hits).

        "Not known yet" as long as nobody computes it: blocks that are reserved for what has not begun may be those that
        a prompt needs whose own blocks are what keeps it from beginning.
        """
        ...

    def update_state_after_alloc(self, request: Request, block_ids: Sequence[int], num_external_tokens: int) -> None:
        """Blocks for the whole prompt are reserved, in prompt order; the last ones are to be filled from elsewhere.

        Those of the tokens before came from the local cache and must not be written. A prefill leg has nothing to be
        filled from elsewhere: it begins to be computed.
        """
        ...

    def blocks_computed(self, request: Request, block_ids: Sequence[int], num_computed_tokens: int) -> None:
        """A step committed: the first `num_computed_tokens` of the request have KV in `block_ids`."""
        ...

    def load_failed(self, request: Request, block_ids: Sequence[int]) -> BlockFate:
        """A load into these blocks failed, and the request goes on without it: nothing is asked for it any more."""
        ...

    def request_finished(self, request: Request, block_ids: Sequence[int], transferring: bool) -> BlockFate:
        """The request ended with these blocks. `transferring`: a transfer into them was started and has not reported.

        For the prefill leg it is called with the first token already in `request.output_token_ids`, and with its
        log-probabilities in `request.last_logprobs`.
        """
        ...


class NullConnector:
    """For an engine that runs whole requests alone."""

    def request_added(self, request: Request) -> None:
        return

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> ExternalTokens:
        return NO_EXTERNAL_TOKENS

    def update_state_after_alloc(self, request: Request, block_ids: Sequence[int], num_external_tokens: int) -> None:
        if num_external_tokens:
            raise RuntimeError("no external tokens were promised")

    def blocks_computed(self, request: Request, block_ids: Sequence[int], num_computed_tokens: int) -> None:
        return

    def load_failed(self, request: Request, block_ids: Sequence[int]) -> BlockFate:
        return BlockFate.FREE

    def request_finished(self, request: Request, block_ids: Sequence[int], transferring: bool) -> BlockFate:
        return BlockFate.FREE
