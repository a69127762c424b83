"""Which blocks each request has, how it gets them, and what becomes of them when it ends.

Two rules keep wrong KV out of reach:
  - a block enters the prefix cache's index only after its KV was computed or has arrived (`cache_blocks` is called
    at commit, never at allocation), so a failed step or transfer leaves nothing to be found;
  - a failed call changes no count.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from baton.engine.block_hash import BlockHasher
from baton.engine.block_pool import Block, BlockInvariantBroken, BlockPool
from baton.engine.host_tier import NO_COPIES, HostTier, StepCopies
from baton.engine.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventLog, KVSnapshot, Tier
from baton.engine.outputs import BlockCopy
from baton.engine.request import Request


class AllocationAnswer(enum.Enum):
    """What an allocator can say."""

    OK = "ok"
    LATER = "later"
    """Not now; it fits when others have let go of blocks."""
    NEVER = "never"
    """It does not fit into the empty pool."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """An answer and, when it is OK, the blocks taken from the pool (cache hits are not among them)."""

    answer: AllocationAnswer
    new_block_ids: Sequence[int] = ()
    copy: BlockCopy | None = None
    """What must be copied before anything is computed in these blocks."""


@dataclass(frozen=True, slots=True)
class ComputedBlocks:
    """A prefix of a request that the cache has. Valid until the next call that takes blocks; not held yet."""

    blocks: Sequence[Block]
    num_tokens: int
    copy_from: Block | None = None
    """Holds the last of these tokens, and others write behind them: it is copied, not shared."""
    host_blocks: Sequence[Block] = ()
    """What follows the blocks, in the host tier; copied back."""
    num_host_tokens: int = 0
    """Of `num_tokens`: those in them."""


NO_COMPUTED_BLOCKS = ComputedBlocks((), 0)

_NOTHING_NEEDED = Allocation(AllocationAnswer.OK)
_LATER = Allocation(AllocationAnswer.LATER)
_NEVER = Allocation(AllocationAnswer.NEVER)


class _BlockTable:
    """One live request's blocks in token order."""

    __slots__ = ("blocks", "num_cached_blocks", "num_dropped_blocks", "num_filling_blocks", "num_hit_blocks")

    def __init__(self, num_hit_blocks: int, num_filling_blocks: int) -> None:
        self.blocks: list[Block] = []
        """Those it still has: all but the first `num_dropped_blocks`, which nobody looks at any more."""
        self.num_dropped_blocks = 0
        self.num_hit_blocks = num_hit_blocks
        self.num_filling_blocks = num_filling_blocks
        """Blocks right after the hits that a transfer writes to."""
        self.num_cached_blocks = num_hit_blocks
        """Leading blocks that have been offered to the index."""


class KVCacheManager:
    """Block tables over a pool. Ids are request ids."""

    def __init__(
        self,
        pool: BlockPool,
        hasher: BlockHasher,
        block_size: int,
        *,
        enable_caching: bool,
        host: HostTier | None = None,
    ) -> None:
        self.pool = pool
        self.host = host
        self.block_size = block_size
        self._hasher = hasher
        self._enable_caching = enable_caching
        self._tables: dict[str, _BlockTable] = {}
        self._leased: dict[str, list[Block]] = {}
        self._quarantined: dict[str, list[Block]] = {}
        self.kv_events = KVEventLog()
        pool.on_evict = self._evicted
        self._keeps_evicted = host is not None and enable_caching
        if host is not None:
            host.pool.on_evict = self._evicted_from_host

    def get_computed_blocks(self, request: Request, *, with_host: bool = True) -> ComputedBlocks:
        """The longest cached chain of full blocks, at most num_tokens - 1 tokens: something is left to compute.

        `with_host`: what the chain lacks here may be in the host tier.
        """
        if not self._enable_caching:
            return NO_COMPUTED_BLOCKS
        self._hasher.extend_request(request, request.num_tokens)
        blocks: list[Block] = []
        num_full = (request.num_tokens - 1) // self.block_size
        for key in request.block_hashes[:num_full]:
            block = self.pool.get_cached_block(key)
            if block is None:
                break
            blocks.append(block)
        if self.host is None or not with_host or len(blocks) == num_full:
            return ComputedBlocks(blocks, len(blocks) * self.block_size)
        host_blocks = self.host.find(request.block_hashes[len(blocks) : num_full])
        return ComputedBlocks(
            blocks,
            (len(blocks) + len(host_blocks)) * self.block_size,
            host_blocks=host_blocks,
            num_host_tokens=len(host_blocks) * self.block_size,
        )

    def has_table(self, request_id: str) -> bool:
        """Whether blocks are owned under this id."""
        return request_id in self._tables

    def shared_prefix(self, request_id: str, num_tokens: int) -> ComputedBlocks:
        """The first `num_tokens` tokens of a live request, which has computed them, for another with the same ones.

        Full blocks are shared; the one that the other would append to is copied.
        """
        if self._tables[request_id].num_dropped_blocks:
            raise ValueError(f"{request_id} has dropped blocks of its prefix: it can't be shared")
        blocks = self._tables[request_id].blocks
        num_full = num_tokens // self.block_size
        copy_from = blocks[num_full] if num_tokens % self.block_size else None
        return ComputedBlocks(blocks[:num_full], num_tokens, copy_from)

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        *,
        computed: ComputedBlocks = NO_COMPUTED_BLOCKS,
        num_external_tokens: int = 0,
        num_lookahead_tokens: int = 0,
        num_spared_blocks: int = 0,
    ) -> Allocation:
        """Room for the request's computed tokens plus all of these; all or nothing.

        `computed`: cache hits of a request that has no blocks yet; held before anything is taken.
        `num_external_tokens`: right after the hits; a transfer writes them.
        `num_spared_blocks`: must still be free afterwards, else LATER.
        """
        table = self._tables.get(request.request_id)
        num_tokens = request.num_computed_tokens + computed.num_tokens + num_external_tokens
        num_tokens += num_new_tokens + num_lookahead_tokens
        num_blocks = -(-num_tokens // self.block_size)
        if table is not None:
            missing = num_blocks - len(table.blocks) - table.num_dropped_blocks
            if missing <= 0:
                return _NOTHING_NEEDED
        else:
            missing = num_blocks - len(computed.blocks)
        if num_blocks > self.pool.num_total_blocks:
            return _NEVER
        idle_hits = sum([block.is_on_free_list for block in computed.blocks])
        if missing + idle_hits + num_spared_blocks > self.pool.num_free_blocks:
            return _LATER
        if table is None:
            table = self._open_table(request.request_id, computed, num_external_tokens)
        if self.host is not None:
            # Before anything is taken: what that evicts may take their place.
            self.host.hold(computed.host_blocks)
            # A transfer may write at once, before the step has copied out what was evicted.
            self._keeps_evicted = self._enable_caching and num_external_tokens == 0
        taken = self.pool.get_new_blocks(missing, after=table.blocks[-1] if table.blocks else None)
        table.blocks += taken
        if self.host is not None:
            self._keeps_evicted = self._enable_caching
            self.host.copy_in(computed.host_blocks, taken)
        copy_from = computed.copy_from
        copy = BlockCopy(copy_from.block_id, taken[0].block_id) if copy_from is not None else None
        return Allocation(AllocationAnswer.OK, [block.block_id for block in taken], copy)

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """The first `num_computed_tokens` tokens have KV: their full blocks may be found from now on."""
        table = self._tables[request.request_id]
        num_full = num_computed_tokens // self.block_size
        if num_full <= table.num_cached_blocks or not self._enable_caching:
            return
        self._hasher.extend_request(request, num_computed_tokens)
        first, table.num_cached_blocks = table.num_cached_blocks, num_full
        keys, is_new = request.block_hashes, False
        for index in range(first, num_full):
            is_new |= self.pool.cache_block(table.blocks[index - table.num_dropped_blocks], keys[index])
        if is_new and self.kv_events.is_recording:
            tokens = request.token_ids(first * self.block_size, num_full * self.block_size)
            self.kv_events.record(BlockStored(keys[first:num_full], keys[first - 1] if first else None, tokens))

    def kv_snapshot(self) -> KVSnapshot:
        """Everything that can be found now; from here on `kv_events` are recorded. O(blocks)."""
        self.kv_events.is_recording = True
        found: dict[Tier, frozenset[bytes]] = {"device": frozenset(self.pool.keys)}
        if self.host is not None:
            found["host"] = frozenset(self.host.pool.keys)
        return KVSnapshot(found, self.kv_events.next_sequence)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached KV; False, and nothing changes, while any block is held."""
        if self.host is not None and self.host.pool.num_free_blocks != self.host.pool.num_total_blocks:
            return False
        if not self.pool.reset_prefix_cache():
            return False
        if self.host is not None:
            self.host.pool.reset_prefix_cache()
        self.kv_events.record(AllBlocksCleared())
        return True

    def num_slots(self, request_id: str) -> int:
        """Tokens that a live request's blocks hold."""
        table = self._tables[request_id]
        return (len(table.blocks) + table.num_dropped_blocks) * self.block_size

    def drop_before(self, request_id: str, position: int) -> None:
        """Let go of a live request's blocks whose tokens all lie before `position`: it looks at none of them again."""
        table = self._tables[request_id]
        count = position // self.block_size - table.num_dropped_blocks
        if count > 0:
            self.pool.free_blocks(table.blocks[:count])
            del table.blocks[:count]
            table.num_dropped_blocks += count

    def block_ids(self, request_id: str) -> list[int]:
        """A live request's table, with the null block in the place of dropped ones; empty when it has none."""
        table = self._tables.get(request_id)
        if table is None:
            return []
        return [self.pool.null_block.block_id] * table.num_dropped_blocks + [block.block_id for block in table.blocks]

    def free(self, request_id: str) -> None:
        """Let go of a live request's blocks, here or in the host tier; nothing when it has none."""
        table = self._tables.pop(request_id, None)
        if table is not None:
            self.pool.free_blocks(table.blocks)
        elif self.host is not None:
            self.host.drop(request_id)

    def num_computed_blocks(self, request: Request) -> int:
        """Blocks with KV in them."""
        return -(-request.num_computed_tokens // self.block_size)

    def swap_out(self, request: Request) -> bool:
        """Move a request's KV to the host tier in the coming step; False, and nothing changes, without room there."""
        table, num_blocks = self._tables[request.request_id], self.num_computed_blocks(request)
        if self.host is None or num_blocks == 0 or table.num_dropped_blocks:
            # Of a window's sequence only the tail is left; computing it again is cheap beside its length.
            return False
        keys = request.block_hashes[: min(table.num_cached_blocks, num_blocks)]
        if not self.host.put(request.request_id, table.blocks[:num_blocks], keys):
            return False
        del self._tables[request.request_id]
        self.pool.free_blocks(table.blocks)
        return True

    def swap_in(self, request: Request, *, num_spared_blocks: int = 0) -> AllocationAnswer:
        """Move a request's KV back in the coming step, and make room for all its tokens; all or nothing.

        Leading blocks that are still in the prefix cache here are not copied.
        """
        if self.host is None:
            raise ValueError("there is no host tier")
        found: list[Block] = []
        for key in request.block_hashes[: request.num_computed_tokens // self.block_size]:
            block = self.pool.get_cached_block(key)
            if block is None:
                break
            found.append(block)
        missing = -(-request.num_tokens // self.block_size) - len(found)
        idle = sum([block.is_on_free_list for block in found])
        if missing + idle + num_spared_blocks > self.pool.num_free_blocks:
            return AllocationAnswer.LATER
        table = self._open_table(request.request_id, ComputedBlocks(found, len(found) * self.block_size), 0)
        table.blocks += self.pool.get_new_blocks(missing, after=found[-1] if found else None)
        self.host.fetch(request.request_id, table.blocks, start=len(found))
        return AllocationAnswer.OK

    def take_copies(self, step: int) -> StepCopies:
        """What a step that is being decided copies from and to the host tier."""
        return self.host.begin_step(step) if self.host is not None else NO_COPIES

    def begin_step(self, step: int) -> None:
        """A step was decided: until `settle` what it may write to is nobody else's."""
        self.pool.raise_fence(step)

    def settle(self, step: int, lost: bool) -> None:
        """A step was computed, or lost and may have copied nothing."""
        stored = self.host.settle(step, lost) if self.host is not None else []
        if stored and self.kv_events.is_recording:
            self.kv_events.record(BlockStored(stored, tier="host"))
        self.pool.lift_fence(step)

    def lease(self, request_id: str) -> None:
        """The request ended, but a peer may read its blocks until `release`; nothing when it has none."""
        table = self._tables.pop(request_id, None)
        if table is not None:
            self.pool.lease(table.blocks)
            self._leased[request_id] = table.blocks

    def quarantine(self, request_id: str) -> None:
        """The request ended, but a transfer may write to its blocks until `release`; nothing when it has none.

        Cache hits in front of the written blocks and lookahead behind them are free at once.
        """
        table = self._tables.pop(request_id, None)
        if table is None:
            return
        end = table.num_hit_blocks + table.num_filling_blocks
        filling = table.blocks[table.num_hit_blocks : end]
        self.pool.quarantine(filling)
        self.pool.free_blocks(table.blocks[: table.num_hit_blocks] + table.blocks[end:])
        self._quarantined[request_id] = filling

    def release(self, request_id: str) -> bool:
        """Nobody touches the leased or quarantined blocks of this ended request any more. False when it has none."""
        leased = self._leased.pop(request_id, None)
        if leased is not None:
            self.pool.end_lease(leased)
            return True
        quarantined = self._quarantined.pop(request_id, None)
        if quarantined is not None:
            self.pool.end_quarantine(quarantined)
            return True
        return False

    def holds(self, request_id: str) -> bool:
        """Whether blocks of this ended request are leased or quarantined."""
        return request_id in self._leased or request_id in self._quarantined

    def check_invariant(self) -> None:
        """The pools' own books, and their counts against all tables; raises BlockInvariantBroken. O(blocks)."""
        self.pool.check_invariant()
        if self.host is not None:
            self.host.check_invariant()
        owners = Counter(block.block_id for table in self._tables.values() for block in table.blocks)
        owners.update(block.block_id for block in self.pool.fenced)
        leases = Counter(block.block_id for blocks in self._leased.values() for block in blocks)
        held = Counter(block.block_id for blocks in self._quarantined.values() for block in blocks)
        problems = [
            f"{block!r}: tables {owners[block.block_id]}, leases {leases[block.block_id]}, "
            f"quarantines {held[block.block_id]}, of {self._holders(block)}"
            for block in self.pool.blocks
            if (owners[block.block_id], leases[block.block_id], held[block.block_id])
            != (block.owner_cnt, block.lease_cnt, int(block.quarantined))
        ]
        if problems:
            raise BlockInvariantBroken(f"block tables: {'; '.join(problems)}")

    def _evicted(self, evicted: Sequence[tuple[Block, bytes]]) -> None:
        if self.kv_events.is_recording:
            self.kv_events.record(BlockRemoved([key for _, key in evicted]))
        if self.host is not None and self._keeps_evicted:
            self.host.keep(evicted)

    def _evicted_from_host(self, evicted: Sequence[tuple[Block, bytes]]) -> None:
        if self.kv_events.is_recording:
            self.kv_events.record(BlockRemoved([key for _, key in evicted], "host"))

    def _holders(self, block: Block) -> list[str]:
        return [
            *(request_id for request_id, table in self._tables.items() if block in table.blocks),
            *(request_id for request_id, blocks in self._leased.items() if block in blocks),
            *(request_id for request_id, blocks in self._quarantined.items() if block in blocks),
        ]

    def _open_table(self, request_id: str, computed: ComputedBlocks, num_external_tokens: int) -> _BlockTable:
        num_filling = -(-num_external_tokens // self.block_size)
        table = _BlockTable(len(computed.blocks), num_filling)
        self.pool.touch(computed.blocks)
        table.blocks += computed.blocks
        self._tables[request_id] = table
        return table
