"""KV between nodes: which nodes can exchange it, the null block, and changes of a node's prefix cache, as routers and
other subscribers receive them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

from baton.values import value

NULL_BLOCK = 0
"""The id that stands for no block, in the block tables of every node."""

Tier = Literal["device", "host", "encoder"]
"""Where something is kept: blocks of KV in the model's memory or the host's, or rows that an encoder made of inputs.
Rows are named by `rows_key`, and come and go in events of their own."""
_FIRST_PROTOCOL_OF_OTHER_SIZES = 6
"""The first version of the link's protocol between nodes whose block sizes may differ."""


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


class _HasKVFormat(Protocol):
    """A node's description, or its record in the registry."""

    @property
    def model_fingerprint(self) -> str: ...
    @property
    def numerics(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def block_size(self) -> int: ...
    @property
    def link_protocol(self) -> int: ...
    @property
    def kv_shape(self) -> str: ...


class KVFormat(NamedTuple):
    """The format of a node's KV: two nodes whose formats fit can exchange it.

    A tuple, since routers compare formats in each choice of a pair of nodes.
    """

    model_fingerprint: str
    numerics: str
    dtype: str
    block_size: int
    """Tokens in a block."""
    link_protocol: int
    """Version of the protocol between nodes that hands KV over; 0: not known."""
    kv_shape: str = ""
    """See `NodeDescription.kv_shape`. Nodes of equal numerics fit whatever it is."""

    @classmethod
    def of(cls, node: _HasKVFormat) -> KVFormat:
        """The format of the node with this description or record."""
        decided_by = node.model_fingerprint, node.numerics, node.dtype
        return cls(*decided_by, node.block_size, node.link_protocol, node.kv_shape)

    def fits(self, other: KVFormat, *, across: bool = False) -> bool:
        """Whether nodes of these two formats can exchange KV: all must be equal but the block sizes, which must fit.

        The sizes may differ from version 6 of the protocol on. `across`: the numerics may differ, too, between nodes
        that both say the shape of their KV.
        """
        if self == other:
            return True
        if self.model_fingerprint != other.model_fingerprint:
            return False
        crosses = across and self.kv_shape != "" and self.kv_shape == other.kv_shape
        numerics = other.numerics if crosses else self.numerics
        alike = self._replace(numerics=numerics, block_size=other.block_size, kv_shape=other.kv_shape)
        return alike == other and self._sizes_fit(other)

    def misfits(self, other: KVFormat) -> list[str]:
        """The names of the fields because of which the two formats don't fit."""
        return [
            name
            for name, ours, theirs in zip(self._fields, self, other, strict=True)
            if ours != theirs
            if not (name == "block_size" and self._sizes_fit(other))
            if not (name == "kv_shape" and self.numerics == other.numerics)
        ]

    def _sizes_fit(self, other: KVFormat) -> bool:
        return self.block_size == other.block_size or (
            block_sizes_fit(self.block_size, other.block_size)
            and min(self.link_protocol, other.link_protocol) >= _FIRST_PROTOCOL_OF_OTHER_SIZES
        )


def block_sizes_fit(one: int, other: int) -> bool:
    """Whether nodes with blocks of so many tokens can exchange KV: one size must divide the other."""
    small, large = sorted((one, other))
    return small == large or (small > 0 and large % small == 0)
