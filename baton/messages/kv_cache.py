"""What a node's prefix cache took in and lost, for readers elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from baton.values import value

Tier = Literal["device", "host"]


class BlockStored(NamedTuple):
    """Blocks that can be found from now on, in the order of their chain; some of them may have been before."""

    block_hashes: Sequence[bytes]
    parent_block_hash: bytes | None = None
    """The key of the block before the first; None when that begins a prompt, and in the host tier."""
    token_ids: Sequence[int] = ()
    """The tokens of all these blocks; empty in the host tier, which only knows keys, and where no reader wants them."""
    group: int = 0
    """The group of layers whose KV it is."""
    tier: Tier = "device"


class BlockRemoved(NamedTuple):
    """Blocks that were evicted from a tier."""

    block_hashes: Sequence[bytes]
    tier: Tier = "device"


class AllBlocksCleared(NamedTuple):
    """Nothing can be found any more, in any tier."""

    block_hashes: Sequence[bytes] = ()


KVCacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


@value(frozen=True, slots=True)
class KVCacheUpdate:
    """What the prefix cache took in and lost, numbered without gaps; without the tokens of what it took in."""

    first_sequence: int
    """A reader that does not stand here has missed something and asks with WatchKVCache for everything."""
    next_sequence: int
    events: Sequence[KVCacheEvent]
    restart: bool = False
    """Forget everything: what can be found follows, in this update and maybe in more that have no number of their own.
    """
