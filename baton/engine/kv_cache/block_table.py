"""The block table of one live request, and what the KV cache manager answers about prefixes and allocations."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence

from baton.engine.batch import BlockCopy
from baton.engine.kv_cache.block_pool import Block, BlockPool
from baton.values import value


class AllocationAnswer(enum.Enum):
    """Whether an allocation succeeded."""

    OK = "ok"
    LATER = "later"
    """The blocks are not free now; the allocation succeeds when other requests have freed theirs."""
    NEVER = "never"
    """The allocation does not fit even into the empty pool."""


@value(frozen=True, slots=True)
class Allocation:
    """The result of an allocation: an answer and, if it is OK, the blocks taken from the pool, without cache hits."""

    answer: AllocationAnswer
    new_block_ids: Sequence[int] = ()
    copies: Sequence[BlockCopy] = ()
    """Copies that the runner must make before it computes anything in the new blocks."""


@value(frozen=True, slots=True)
class Growth:
    """How many tokens a request may compute now, and the blocks that its table got for them."""

    num_tokens: int
    new_block_ids: Sequence[int] = ()


@value(frozen=True, slots=True)
class ComputedBlocks:
    """A prefix of a request whose KV exists. The blocks are not held: valid until the next call that takes blocks."""

    blocks: Sequence[Block]
    """The first entries of the request's table."""
    num_tokens: int
    """Tokens of the whole prefix, those in the host tier included."""
    copy_from: Sequence[Block] = ()
    """The entries of a last, partly filled stripe: they are copied, not shared, since its owner writes to them."""
    host_blocks: Sequence[Block] = ()
    """The continuation of the prefix in the host tier, which is copied back."""
    num_host_tokens: int = 0
    """Tokens in `host_blocks`."""

    @property
    def num_idle_blocks(self) -> int:
        """How many of `blocks` no request holds now."""
        return sum([block.is_on_free_list for block in self.blocks]) if self.blocks else 0

    def without_host(self) -> ComputedBlocks:
        """The part of the prefix that is on the device."""
        return ComputedBlocks(self.blocks, self.num_tokens - self.num_host_tokens, self.copy_from)


NO_COMPUTED_BLOCKS = ComputedBlocks((), 0)


class BlockTable:
    """One live request's blocks in token order."""

    __slots__ = (
        "blocks",
        "num_cached_stripes",
        "num_dropped_stripes",
        "num_filling_entries",
        "num_hit_entries",
        "num_stripes_to_come",
        "spare",
    )

    def __init__(self, blocks: list[Block], num_groups: int, num_filling_stripes: int) -> None:
        """`blocks`: cache hits. `num_filling_stripes`: stripes right behind the hits, to which a transfer writes."""
        self.blocks = blocks
        """The table's entries; the null block where there is no block."""
        self.num_hit_entries = len(blocks)
        self.num_filling_entries = num_filling_stripes * num_groups
        self.num_cached_stripes = len(blocks) // num_groups
        """Leading stripes that were entered into the prefix cache's index."""
        self.num_dropped_stripes = [0] * num_groups
        """For each group: leading stripes whose entries `drop_unseen` has freed."""
        self.spare: list[Block] | None = None
        """Blocks for entries to come, of a table that grows while its prompt is computed (`allocate_to_grow`); None:
        the table has all its entries."""
        self.num_stripes_to_come = 0
        """The number of stripes at which a growing table is complete."""


class HeldBlocks:
    """The blocks of ended requests that a peer may still read, or to which a transfer may still write."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._leased: dict[str, list[Block]] = {}
        self._quarantined: dict[str, list[Block]] = {}

    def lease(self, request_id: str, blocks: list[Block]) -> None:
        """Keep the blocks for a reader."""
        self._pool.lease(blocks)
        self._leased[request_id] = blocks

    def quarantine(self, request_id: str, blocks: list[Block]) -> None:
        """Keep the blocks, which nobody may use, for a writer."""
        self._pool.quarantine(blocks)
        self._quarantined[request_id] = blocks

    def release(self, request_id: str) -> bool:
        """Free a request's blocks, which no peer or transfer accesses any more. False: it has none here."""
        if (leased := self._leased.pop(request_id, None)) is not None:
            self._pool.end_lease(leased)
            return True
        if (quarantined := self._quarantined.pop(request_id, None)) is not None:
            self._pool.end_quarantine(quarantined)
            return True
        return False

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._leased or request_id in self._quarantined

    def holders(self, block: Block) -> list[str]:
        """The ended requests that hold a block."""
        held = (*self._leased.items(), *self._quarantined.items())
        return [request_id for request_id, blocks in held if block in blocks]

    def counts(self) -> tuple[Counter[int], Counter[int]]:
        """How often each block, by id, is leased and quarantined here."""
        leased, quarantined = (
            Counter(block.block_id for blocks in held.values() for block in blocks)
            for held in (self._leased, self._quarantined)
        )
        return leased, quarantined
