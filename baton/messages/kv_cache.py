"""The id of the null block, and changes of a node's prefix cache, as routers and other subscribers receive them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from baton.values import value

NULL_BLOCK = 0
"""The id that stands for no block, in the block tables of every node."""

Tier = Literal["device", "host", "encoder"]
"""Where something is kept: blocks of KV in the model's memory or the host's, or rows that an encoder made of inputs.
Rows are named by `rows_key`, and come and go in events of their own."""


class BlockStored(NamedTuple):
    """Blocks that can be found from now on, in the order of their chain. Some may have been in the cache before."""

    block_hashes: Sequence[bytes]
    parent_block_hash: bytes | None = None
    """The key of the block before the first one; None when the first one begins a prompt, and in the host tier."""
    token_ids: Sequence[int] = ()
    """The tokens of all these blocks; empty in the host tier, which only knows keys, and where no reader wants them."""
    group: int = 0
    """Index of the group of layers whose KV the blocks hold."""
    tier: Tier = "device"


class BlockRemoved(NamedTuple):
    """Blocks that were evicted from a tier."""

    block_hashes: Sequence[bytes]
    tier: Tier = "device"


class AllBlocksCleared(NamedTuple):
    """The prefix cache was emptied, in all tiers of blocks. Rows of encoders stay."""

    block_hashes: Sequence[bytes] = ()


KVCacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


@value(frozen=True, slots=True)
class KVCacheUpdate:
    """Changes of the prefix cache, numbered without gaps. Stored blocks come without their tokens."""

    first_sequence: int
    """The number of the first event. A reader that expects another one has missed events, and asks for a snapshot with
    WatchKVCache."""
    next_sequence: int
    events: Sequence[KVCacheEvent]
    restart: bool = False
    """Whether this update begins a snapshot: the reader forgets all blocks. The snapshot may continue in further
    updates, whose events have no numbers of their own."""
