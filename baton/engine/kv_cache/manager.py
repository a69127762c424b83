"""Which blocks each request has, how it gets them, and what becomes of them when it ends.

A request's table has, for each `block_size` of its tokens, a stripe: one block of every group of layers, in the order
of the groups (see LayerGroup). Where nobody looks at a group's block any more, since its window has moved on, the table
has the null block. What follows here speaks of entries of a table where it counts blocks, and of stripes where it
counts their tokens.

Two rules keep wrong KV out of reach:
  - a block enters the prefix cache's index only after its KV was computed or has arrived (`cache_blocks` is called
    at commit, never at allocation), so a failed step or transfer leaves nothing to be found;
  - a failed call changes no count.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection, Sequence

from baton.engine.batch import BlockCopy
from baton.engine.kv_cache.block_hash import BlockHasher, group_key
from baton.engine.kv_cache.block_pool import Block, BlockInvariantBroken, BlockPool
from baton.engine.kv_cache.cache_groups import CacheGroups
from baton.engine.kv_cache.events import KVEventLog, KVSnapshot
from baton.engine.kv_cache.host_tier import NO_COPIES, HostTier, StepCopies
from baton.engine.request import Request
from baton.messages.kv_cache import AllBlocksCleared, BlockRemoved, BlockStored, Tier
from baton.values import value


class AllocationAnswer(enum.Enum):
    """What an allocator can say."""

    OK = "ok"
    LATER = "later"
    """Not now; it fits when others have let go of blocks."""
    NEVER = "never"
    """It does not fit into the empty pool."""


@value(frozen=True, slots=True)
class Allocation:
    """An answer and, when it is OK, the blocks taken from the pool (cache hits are not among them)."""

    answer: AllocationAnswer
    new_block_ids: Sequence[int] = ()
    copies: Sequence[BlockCopy] = ()
    """What must be copied before anything is computed in these blocks."""


@value(frozen=True, slots=True)
class Growth:
    """How many tokens a request may compute now, and the blocks that its table got for them."""

    num_tokens: int
    new_block_ids: Sequence[int] = ()


@value(frozen=True, slots=True)
class ComputedBlocks:
    """A prefix of a request that the cache has. Valid until the next call that takes blocks; not held yet."""

    blocks: Sequence[Block]
    """The first entries of its table."""
    num_tokens: int
    copy_from: Sequence[Block] = ()
    """The stripe that holds the last of these tokens, if others write behind them: it is copied, not shared."""
    host_blocks: Sequence[Block] = ()
    """What follows the blocks, in the host tier; copied back."""
    num_host_tokens: int = 0
    """Of `num_tokens`: those in them."""

    def without_host(self) -> ComputedBlocks:
        """What of it is here."""
        return ComputedBlocks(self.blocks, self.num_tokens - self.num_host_tokens, self.copy_from)


NO_COMPUTED_BLOCKS = ComputedBlocks((), 0)

_NOTHING_NEEDED = Allocation(AllocationAnswer.OK)
_LATER = Allocation(AllocationAnswer.LATER)
_NEVER = Allocation(AllocationAnswer.NEVER)


class _BlockTable:
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
        """`blocks`: cache hits. `num_filling_stripes`: right after them; a transfer writes to those."""
        self.blocks = blocks
        """Its entries; the null block where it has none."""
        self.num_hit_entries = len(blocks)
        self.num_filling_entries = num_filling_stripes * num_groups
        self.num_cached_stripes = len(blocks) // num_groups
        """Leading stripes that have been offered to the index."""
        self.num_dropped_stripes = [0] * num_groups
        """For each group: leading stripes in which it has nothing, as far as they were looked through."""
        self.spare: list[Block] | None = None
        """Of one that grows while its prompt is computed: blocks that it has in no entry; see `allocate_to_grow`."""
        self.num_stripes_to_come = 0
        """So many it grows to."""


class KVCacheManager:
    """Block tables over a pool. Ids are request ids."""

    def __init__(
        self,
        pool: BlockPool,
        hasher: BlockHasher,
        block_size: int,
        *,
        windows: Sequence[int | None] = (None,),
        enable_caching: bool,
        host: HostTier | None = None,
    ) -> None:
        """`windows`: for each group of layers, how many keys its queries see, themselves included; None: all."""
        self.pool = pool
        self.host = host
        self.block_size = block_size
        self.num_groups = len(windows)
        self._groups = CacheGroups(pool, block_size, windows)
        self._hasher = hasher
        self._enable_caching = enable_caching
        self._tables: dict[str, _BlockTable] = {}
        self.num_growing = 0
        """Requests whose tables grow while they are computed."""
        self._leased: dict[str, list[Block]] = {}
        self._quarantined: dict[str, list[Block]] = {}
        self.kv_events = KVEventLog()
        pool.on_evict = self._evicted
        self._keeps_evicted = host is not None and enable_caching
        if host is not None:
            host.pool.on_evict = self._evicted_from_host

    def get_computed_blocks(self, request: Request, *, with_host: bool = True) -> ComputedBlocks:
        """The longest cached prefix of full blocks, at most num_tokens - 1 tokens: something is left to compute.

        Of a group with a window only the blocks are needed that the next query sees.
        `with_host`: what the prefix lacks here may be in the host tier, in all groups.
        """
        if not self._enable_caching:
            return NO_COMPUTED_BLOCKS
        self._hasher.extend_request(request, request.num_tokens)
        num_full = (request.num_tokens - 1) // self.block_size
        keys = request.block_hashes[:num_full]
        blocks = self._groups.find(keys)
        num_stripes = len(blocks) // self.num_groups
        if self.host is None or not with_host or num_stripes == num_full:
            return ComputedBlocks(blocks, num_stripes * self.block_size)
        host_blocks = self.host.find(self._groups.entry_keys(keys[num_stripes:]))
        num_host_stripes = len(host_blocks) // self.num_groups
        return ComputedBlocks(
            blocks,
            (num_stripes + num_host_stripes) * self.block_size,
            host_blocks=host_blocks[: num_host_stripes * self.num_groups],
            num_host_tokens=num_host_stripes * self.block_size,
        )

    def has_table(self, request_id: str) -> bool:
        """Whether blocks are owned under this id."""
        return request_id in self._tables

    def shared_prefix(self, request_id: str, num_tokens: int) -> ComputedBlocks | None:
        """The first `num_tokens` tokens of a live request, which has computed them, for another with the same ones.

        Full blocks are shared; those that the other would append to are copied. None: some that the other would look at
        are gone, since the one that computed them does not see them any more.
        """
        blocks, groups = self._tables[request_id].blocks, self.num_groups
        full = num_tokens // self.block_size * groups
        end = full + groups if num_tokens % self.block_size else full
        for group, window in self._groups.windows:
            first = self._groups.first_seen(num_tokens, window) * groups + group
            if self.pool.null_block in blocks[first:end:groups]:
                return None
        return ComputedBlocks(blocks[:full], num_tokens, blocks[full:end])

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
        num_entries = -(-num_tokens // self.block_size) * self.num_groups
        if table is not None:
            missing = num_entries - len(table.blocks)
            if missing <= 0:
                return _NOTHING_NEEDED
        else:
            missing = num_entries - len(computed.blocks)
        unseen: Collection[int] = ()
        if num_external_tokens and self._groups.windows:
            unseen = self._groups.unseen_entries(
                range(num_entries - missing, num_entries), request.num_submitted_tokens
            )
            missing -= len(unseen)
        if missing + len(self._there(table.blocks if table is not None else list(computed.blocks))) > (
            self.pool.num_total_blocks
        ):
            return _NEVER
        idle_hits = sum([block.is_on_free_list for block in computed.blocks]) if computed.blocks else 0
        if missing + idle_hits + num_spared_blocks > self.pool.num_free_blocks:
            return _LATER
        if table is None:
            table = self._open_table(request.request_id, computed.blocks, num_external_tokens)
        if self.host is not None:
            # Before anything is taken: what that evicts may take their place.
            self.host.hold(computed.host_blocks)
            # A transfer may write at once, before the step has copied out what was evicted.
            self._keeps_evicted = self._enable_caching and num_external_tokens == 0
        taken = self.pool.get_new_blocks(missing, after=table.blocks[-1] if table.blocks else None)
        self._append(table, taken, num_entries, unseen)
        if self.host is not None:
            self._keeps_evicted = self._enable_caching
            self.host.copy_in(computed.host_blocks, taken)
        copies: Sequence[BlockCopy] = ()
        if computed.copy_from:
            copies = [
                BlockCopy(block.block_id, new.block_id) for block, new in zip(computed.copy_from, taken, strict=False)
            ]
        return Allocation(AllocationAnswer.OK, [block.block_id for block in taken], copies)

    def allocate_to_grow(
        self, request: Request, computed: ComputedBlocks, num_chunk_tokens: int, num_spared_blocks: int
    ) -> AllocationAnswer:
        """As many blocks as the request holds at most while it is computed in chunks, where windows bound that.

        Its table then grows with its chunks (`grow`), and takes again what it lets go of: it never waits for anybody
        else, as if it had all its blocks from the start. Until it is whole nothing of it can be found by others, who
        would keep what it is to use again.
        """
        num_tokens = request.num_tokens - computed.num_tokens
        num_missing = -(-num_tokens // self.block_size)
        num_held = self._groups.num_held(num_missing, self.block_size)
        num_hits = len(self._there(list(computed.blocks)))
        if num_held + num_hits > self.pool.num_total_blocks:
            return AllocationAnswer.NEVER
        idle_hits = sum([block.is_on_free_list for block in computed.blocks])
        num_available = self.pool.num_free_blocks - idle_hits - num_spared_blocks
        if num_held > num_available:
            return AllocationAnswer.LATER
        num_wished = self._groups.num_held(num_missing, num_chunk_tokens)
        # With less its chunks are as short as what it has.
        num_held = num_wished if num_wished <= num_available else num_held
        table = self._open_table(request.request_id, computed.blocks, 0)
        table.spare = self.pool.get_new_blocks(num_held)
        table.num_stripes_to_come = len(computed.blocks) // self.num_groups + num_missing
        self.num_growing += 1
        return AllocationAnswer.OK

    def grow(self, request: Request, num_tokens: int) -> Growth:
        """Entries for the next tokens of a request, all that it has blocks for; nothing new if it has them all."""
        table = self._tables[request.request_id]
        if table.spare is None:
            return Growth(num_tokens)
        groups, num_stripes = self.num_groups, len(table.blocks) // self.num_groups
        wanted = -(-(request.num_computed_tokens + num_tokens) // self.block_size) - num_stripes
        count = max(0, min(wanted, len(table.spare) // groups))
        taken, table.spare = table.spare[: count * groups], table.spare[count * groups :]
        table.blocks += taken
        num_stripes += count
        if num_stripes >= table.num_stripes_to_come:
            self._end_growth(table)
        num_slots = num_stripes * self.block_size - request.num_computed_tokens
        return Growth(min(num_tokens, num_slots), [block.block_id for block in taken])

    @property
    def has_windows(self) -> bool:
        return bool(self._groups.windows)

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """The first `num_computed_tokens` tokens have KV: their full blocks may be found from now on."""
        table = self._tables[request.request_id]
        num_full = num_computed_tokens // self.block_size
        if num_full <= table.num_cached_stripes or not self._enable_caching or table.spare is not None:
            return
        self._hasher.extend_request(request, num_computed_tokens)
        first, table.num_cached_stripes = table.num_cached_stripes, num_full
        for group in range(self.num_groups):
            self._cache_group(request, table, group, first, num_full)

    def cache_valid(self, request: Request, num_valid_blocks: int) -> int:
        """The first entries of a load that failed hold KV: the full stripes of them may be found from now on.

        Returns how many stripes that are.
        """
        num_stripes = min(num_valid_blocks // self.num_groups, request.num_submitted_tokens // self.block_size)
        self.cache_blocks(request, num_stripes * self.block_size)
        return num_stripes

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

    @property
    def num_cached_blocks(self) -> int:
        """Blocks with KV that can be found, in both tiers."""
        return self.pool.num_cached_blocks + (self.host.pool.num_cached_blocks if self.host is not None else 0)

    def blocks_in_use(self) -> str:
        """Says who holds blocks, for a person; empty when nobody does and the prefix cache can be reset."""
        accounts = self.pool.accounts()
        held = [
            (accounts.owned, "held by requests or a step that has not ended"),
            (accounts.leased, "offered to decode nodes"),
            (accounts.quarantined, "that a transfer may still write to"),
        ]
        if self.host is not None:
            host = self.host.pool
            held.append((host.num_total_blocks - host.num_free_blocks, "of the host tier"))
        return ", ".join(f"{count} {by_whom}" for count, by_whom in held if count)

    def num_slots(self, request_id: str) -> int:
        """Tokens that a live request's blocks hold."""
        return len(self._tables[request_id].blocks) // self.num_groups * self.block_size

    def drop_unseen(self, request_id: str, num_computed_tokens: int) -> None:
        """Let go of a live request's blocks that no query from `num_computed_tokens` on sees."""
        table, null, groups = self._tables[request_id], self.pool.null_block, self.num_groups
        for group, window in self._groups.windows:
            first, end = table.num_dropped_stripes[group], self._groups.first_seen(num_computed_tokens, window)
            if end > first:
                table_entries = table.blocks[first * groups + group : end * groups : groups]
                dropped = self._there(table_entries)
                table.blocks[first * groups + group : end * groups : groups] = [null] * (end - first)
                table.num_dropped_stripes[group] = end
                if table.spare is None:
                    self.pool.free_blocks(dropped)
                else:
                    # Others may have what it found in the cache.
                    num_hits = max(0, table.num_hit_entries // groups - first)
                    own = self._there(table_entries[num_hits:])
                    table.spare += own
                    self.pool.free_blocks(self._there(table_entries[:num_hits]))

    def block_ids(self, request_id: str) -> list[int]:
        """A live request's table, with the null block where it has none; empty when it has no table."""
        table = self._tables.get(request_id)
        return [block.block_id for block in table.blocks] if table is not None else []

    def submitted_block_ids(self, request: Request) -> list[int]:
        """Its table up to the end of what it came with; the null block stands for what nobody sees who goes on there.

        Whoever does may compute the last one of those tokens again.
        """
        num_entries = -(-request.num_submitted_tokens // self.block_size) * self.num_groups
        table = self._tables.get(request.request_id)
        block_ids = [block.block_id for block in table.blocks[:num_entries]] if table is not None else []
        if not self._groups.windows:
            return block_ids
        for entry in self._groups.unseen_entries(range(len(block_ids)), request.num_submitted_tokens):
            block_ids[entry] = self.pool.null_block.block_id
        return block_ids

    def free(self, request_id: str) -> None:
        """Let go of a live request's blocks, here or in the host tier; nothing when it has none."""
        table = self._tables.pop(request_id, None)
        if table is not None:
            self._end_growth(table)
            self.pool.free_blocks(self._there(table.blocks))
        elif self.host is not None:
            self.host.drop(request_id)

    def num_computed_blocks(self, request: Request) -> int:
        """Blocks with KV in them, as far as its windows have not moved on."""
        num_stripes = -(-request.num_computed_tokens // self.block_size)
        unseen = sum(self._groups.first_seen(request.num_computed_tokens, window) for _, window in self._groups.windows)
        return num_stripes * self.num_groups - unseen

    def swap_out(self, request: Request) -> bool:
        """Move a request's KV to the host tier in the coming step; False, and nothing changes, without room there."""
        table, null = self._tables[request.request_id], self.pool.null_block
        num_stripes = -(-request.num_computed_tokens // self.block_size)
        if self.host is None or num_stripes == 0 or table.spare is not None:
            return False
        entries = table.blocks[: num_stripes * self.num_groups]
        keys = self._groups.entry_keys(request.block_hashes[: min(table.num_cached_stripes, num_stripes)])
        if not self.host.put(request.request_id, [None if block is null else block for block in entries], keys):
            return False
        del self._tables[request.request_id]
        self.pool.free_blocks(self._there(table.blocks))
        return True

    def swap_in(self, request: Request, *, num_spared_blocks: int = 0) -> AllocationAnswer:
        """Move a request's KV back in the coming step, and make room for all its tokens; all or nothing.

        Blocks that are still in the prefix cache here are not copied.
        """
        if self.host is None:
            raise ValueError("there is no host tier")
        swapped, null = self.host.table(request.request_id), self.pool.null_block
        num_full = request.num_computed_tokens // self.block_size
        found: list[Block | None] = [
            self.pool.get_cached_block(key) for key in self._groups.entry_keys(request.block_hashes[:num_full])
        ]
        found += [None] * (len(swapped) - len(found))
        here = [null if host is None else block for host, block in zip(swapped, found, strict=True)]
        kept = [block for block in here if block is not None and block is not null]
        num_entries = -(-request.num_tokens // self.block_size) * self.num_groups
        missing = num_entries - sum([block is not None for block in here])
        idle = sum([block.is_on_free_list for block in kept])
        if missing + idle + num_spared_blocks > self.pool.num_free_blocks:
            return AllocationAnswer.LATER
        table = self._open_table(request.request_id, (), 0)
        self.pool.touch(kept)
        taken = iter(self.pool.get_new_blocks(missing))
        table.blocks += [next(taken) if block is None else block for block in here]
        self.host.fetch(
            request.request_id, [new if old is None else None for new, old in zip(table.blocks, here, strict=True)]
        )
        table.blocks += taken
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
            self._end_growth(table)
            blocks = self._leased[request_id] = self._there(table.blocks)
            self.pool.lease(blocks)

    def quarantine(self, request_id: str, num_valid_stripes: int = 0) -> None:
        """The request ended, but a transfer may write to its blocks until `release`; nothing when it has none.

        Cache hits in front of the written blocks and lookahead behind them are free at once, and so are the first
        `num_valid_stripes`, which the transfer has filled.
        """
        table = self._tables.pop(request_id, None)
        if table is None:
            return
        end = table.num_hit_entries + table.num_filling_entries
        first = max(table.num_hit_entries, num_valid_stripes * self.num_groups)
        filling = self._there(table.blocks[first:end])
        self.pool.quarantine(filling)
        self.pool.free_blocks(self._there(table.blocks[:first] + table.blocks[end:]))
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
        owners = Counter(block.block_id for table in self._tables.values() for block in self._there(table.blocks))
        owners.update(block.block_id for table in self._tables.values() for block in table.spare or ())
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

    def _end_growth(self, table: _BlockTable) -> None:
        """The request has all the blocks that it needs while it is computed; what else it holds goes to others."""
        if table.spare is not None:
            self.num_growing -= 1
            spare, table.spare = table.spare, None
            self.pool.free_blocks(spare)

    def _holders(self, block: Block) -> list[str]:
        return [
            *(request_id for request_id, table in self._tables.items() if block in table.blocks),
            *(request_id for request_id, blocks in self._leased.items() if block in blocks),
            *(request_id for request_id, blocks in self._quarantined.items() if block in blocks),
        ]

    def _open_table(self, request_id: str, hits: Sequence[Block], num_external_tokens: int) -> _BlockTable:
        blocks = list(hits)
        table = _BlockTable(blocks, self.num_groups, -(-num_external_tokens // self.block_size))
        self.pool.touch(self._there(blocks))
        self._tables[request_id] = table
        return table

    def _append(self, table: _BlockTable, taken: Sequence[Block], num_entries: int, unseen: Collection[int]) -> None:
        """Extend a table to `num_entries`, with nothing at those `unseen`."""
        if not unseen:
            table.blocks += taken
            return
        blocks, null = iter(taken), self.pool.null_block
        table.blocks += [null if entry in unseen else next(blocks) for entry in range(len(table.blocks), num_entries)]

    def _there(self, blocks: list[Block]) -> list[Block]:
        """These entries without those that have no block."""
        if not self._groups.windows:
            return blocks
        null = self.pool.null_block
        return [block for block in blocks if block is not null]

    def _cache_group(self, request: Request, table: _BlockTable, group: int, first: int, end: int) -> None:
        """Enter a group's blocks of these stripes into the index."""
        null, groups, is_new, cache_block = self.pool.null_block, self.num_groups, False, self.pool.cache_block
        keys, blocks = request.block_hashes[first:end], table.blocks[first * groups + group : end * groups : groups]
        stored: list[bytes] = []
        for key, block in zip(keys, blocks, strict=True):
            if block is not null:
                name = group_key(key, group) if group else key
                stored.append(name)
                is_new |= cache_block(block, name)
        if is_new and self.kv_events.is_recording:
            # Those without a block are the first ones: windows only move on.
            first = end - len(stored)
            parent = group_key(request.block_hashes[first - 1], group) if first else None
            size, wanted = self.block_size, self.kv_events.with_tokens
            tokens: Sequence[int] = request.token_ids(first * size, end * size) if wanted else ()
            self.kv_events.record(BlockStored(stored, parent, tokens, group))
