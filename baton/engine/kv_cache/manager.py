"""The block tables of requests: how blocks are allocated to them, found in the prefix cache, and freed.

A request's table has, for each `block_size` of its tokens, a stripe: one block of every group of layers, in the order
of the groups (see LayerGroup). Where no query sees a group's block any more, since the window has moved past it, the
table has the null block. Below, an "entry" is one block of a table, and a "stripe" the entries of the same tokens.

Two rules keep wrong KV from being found:
  - a block enters the prefix cache's index only after its KV was computed or has arrived (`cache_blocks` is called
    at commit, never at allocation), so a failed step or transfer leaves nothing to be found;
  - a failed call changes no count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from baton.engine.batch import BlockCopy
from baton.engine.kv_cache.block_hash import BlockHasher, group_key
from baton.engine.kv_cache.block_pool import Block, BlockInvariantBroken, BlockPool
from baton.engine.kv_cache.block_table import (
    NO_COMPUTED_BLOCKS,
    Allocation,
    AllocationAnswer,
    BlockTable,
    ComputedBlocks,
    Growth,
    HeldBlocks,
)
from baton.engine.kv_cache.cache_groups import CacheGroups
from baton.engine.kv_cache.events import KVEventLog
from baton.engine.kv_cache.host_tier import NO_COPIES, HostTier, StepCopies
from baton.engine.request import Request
from baton.messages.kv_cache import AllBlocksCleared, BlockRemoved, BlockStored

_NOTHING_NEEDED = Allocation(AllocationAnswer.OK)
_LATER = Allocation(AllocationAnswer.LATER)
_NEVER = Allocation(AllocationAnswer.NEVER)


class KVCacheManager:
    """The block tables of one engine's requests, by request id."""

    def __init__(
        self,
        pool: BlockPool,
        hasher: BlockHasher,
        block_size: int,
        *,
        windows: Sequence[int | None] = (None,),
        keeps_states: bool = False,
        enable_caching: bool,
        host: HostTier | None = None,
    ) -> None:
        """`windows`: for each group of layers, how many keys its queries see, themselves included; None: all.
        `keeps_states`: whether some groups have states, each behind the last token of its stripe that was computed."""
        self._keeps_states = keeps_states
        self.pool = pool
        self.host = host
        self.block_size = block_size
        self.num_groups = len(windows)
        self._groups = CacheGroups(pool, block_size, windows)
        self.has_windows = bool(self._groups.windows)
        self._hasher = hasher
        self._enable_caching = enable_caching
        self._tables: dict[str, BlockTable] = {}
        self.num_growing = 0
        """Requests whose tables grow while they are computed."""
        self.held = HeldBlocks(pool)
        """Blocks of ended requests."""
        self.kv_events = KVEventLog()
        pool.on_evict = self._evicted
        self._keeps_evicted = host is not None and enable_caching
        if host is not None:
            host.pool.on_evict = self._evicted_from_host

    def get_computed_blocks(self, request: Request, *, with_host: bool = True) -> ComputedBlocks:
        """The longest cached prefix of full blocks, at most `Request.most_cached_tokens`.

        Of a group with a window, only the blocks that the next query sees need to be cached.
        `with_host`: the prefix may continue in the host tier, there with the blocks of all groups.
        """
        if not self._enable_caching:
            return NO_COMPUTED_BLOCKS
        self._hasher.extend_request(request, request.num_tokens)
        num_full = request.most_cached_tokens // self.block_size
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
        """Whether a request has a block table."""
        return request_id in self._tables

    def shared_prefix(self, request: Request, num_tokens: int, *, is_idle: bool = False) -> ComputedBlocks | None:
        """The first `num_tokens` computed tokens of a live request, for another request that begins with these tokens.

        Full blocks are shared; a partly filled stripe is copied. None: the live request has already dropped KV that the
        other one's next query sees, or never had it.
        With states these are fewer tokens, those of full blocks: a partly filled stripe has the states behind the last
        token of it, and a step in flight may have moved them on. `is_idle`: no step has the live request.
        """
        if self._keeps_states and not (is_idle and request.num_computed_tokens == num_tokens):
            num_tokens -= num_tokens % self.block_size
        blocks, groups = self._tables[request.request_id].blocks, self.num_groups
        full = num_tokens // self.block_size * groups
        end = full + groups if num_tokens % self.block_size else full
        for group, window in self._groups.windows:
            first = self._groups.first_seen(num_tokens, window) * groups + group
            seen = blocks[first:end:groups]
            if self.pool.null_block in seen:
                return None
            if self.pool.partly_filled and any(self.pool.partly_filled.get(block, 0) > num_tokens for block in seen):
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
        """Allocate blocks for the request's computed tokens plus all of the following ones; all or nothing.

        `computed`: cache hits of a request that has no blocks yet; they are held before any block is taken.
        `num_external_tokens`: tokens right behind the hits, whose KV a transfer writes.
        `num_lookahead_tokens`: tokens to come for which blocks are reserved.
        `num_spared_blocks`: how many blocks must still be free afterwards; otherwise the answer is LATER.
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
            unseen = self._groups.unseen_entries(range(num_entries - missing, num_entries), self.next_query(request))
            missing -= len(unseen)
        if missing + len(self._groups.without_null(table.blocks if table is not None else list(computed.blocks))) > (
            self.pool.num_total_blocks
        ):
            return _NEVER
        if missing + computed.num_idle_blocks + num_spared_blocks > self.pool.num_free_blocks:
            return _LATER
        if table is None:
            table = self._open_table(request.request_id, computed.blocks, num_external_tokens)
        if self.host is not None:
            # Held before any block is taken: blocks that this evicts go to the host tier, and could replace them.
            self.host.hold(computed.host_blocks)
            # A transfer may write at once, before the step has copied the evicted blocks out.
            self._keeps_evicted = self._enable_caching and num_external_tokens == 0
        taken = self.pool.get_new_blocks(missing, after=table.blocks[-1] if table.blocks else None)
        if unseen:
            fresh, null = iter(taken), self.pool.null_block
            places = range(len(table.blocks), num_entries)
            table.blocks += [null if entry in unseen else next(fresh) for entry in places]
        else:
            table.blocks += taken
        if self.host is not None:
            self._keeps_evicted = self._enable_caching
            self.host.copy_in(computed.host_blocks, taken)
        copies: Sequence[BlockCopy] = ()
        if computed.copy_from:
            pairs = list(zip(computed.copy_from, taken, strict=False))
            copies = [BlockCopy(block.block_id, new.block_id) for block, new in pairs]
            partly = self.pool.partly_filled
            partly.update({new: partly[block] for block, new in pairs if block in partly})
        return Allocation(AllocationAnswer.OK, [block.block_id for block in taken], copies)

    def num_tokens_in_use(self, computed: ComputedBlocks) -> int:
        """How many of the found tokens are in blocks that requests hold now; those of idle blocks are not."""
        return (len(computed.blocks) - computed.num_idle_blocks) // self.num_groups * self.block_size

    def allocate_to_grow(
        self, request: Request, computed: ComputedBlocks, num_chunk_tokens: int, num_spared_blocks: int
    ) -> AllocationAnswer:
        """Allocate the most blocks that a request holds at a time while it is computed in chunks; windows bound them.

        The table then grows with each chunk (`grow`) and reuses the blocks that it drops, so it never waits for blocks
        of other requests. Until the table is complete, none of its blocks is entered into the prefix cache: a request
        that found one there would hold it, and it could not be reused.
        """
        num_tokens = request.num_tokens - computed.num_tokens
        num_missing = -(-num_tokens // self.block_size)
        num_held = self._groups.num_held(num_missing, self.block_size)
        num_hits = len(self._groups.without_null(list(computed.blocks)))
        if num_held + num_hits > self.pool.num_total_blocks:
            return AllocationAnswer.NEVER
        num_available = self.pool.num_free_blocks - computed.num_idle_blocks - num_spared_blocks
        if num_held > num_available:
            return AllocationAnswer.LATER
        num_wanted = self._groups.num_held(num_missing, num_chunk_tokens)
        # With fewer blocks than wanted, `grow` shortens the chunks.
        num_held = num_wanted if num_wanted <= num_available else num_held
        table = self._open_table(request.request_id, computed.blocks, 0)
        table.spare = self.pool.get_new_blocks(num_held)
        table.num_stripes_to_come = len(computed.blocks) // self.num_groups + num_missing
        self.num_growing += 1
        return AllocationAnswer.OK

    def grow(self, request: Request, num_tokens: int) -> Growth:
        """Add entries for the next tokens to a growing table, as far as its blocks suffice.

        A table that does not grow has entries for all its tokens and stays as it is.
        """
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

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Enter the full blocks of the first `num_computed_tokens` tokens, which have KV, into the prefix cache."""
        table = self._tables[request.request_id]
        num_full = num_computed_tokens // self.block_size
        if num_full <= table.num_cached_stripes or not self._enable_caching or table.spare is not None:
            return
        self._hasher.extend_request(request, num_computed_tokens)
        first, table.num_cached_stripes = table.num_cached_stripes, num_full
        for group in range(self.num_groups):
            self._cache_group(request, table, group, first, num_full)

    def note_partly_filled(self, request: Request, entries: Iterable[int]) -> None:
        """Note that a transfer filled only a part of these entries of the table: what no query from the last submitted
        token on sees was not read. Other requests must not find them, nor this one after a preemption."""
        blocks = self._tables[request.request_id].blocks
        self.pool.partly_filled.update((blocks[entry], request.num_submitted_tokens - 1) for entry in entries)

    def cache_valid(self, request: Request, num_valid_blocks: int) -> int:
        """Enter the valid full stripes of a failed load into the prefix cache; returns how many they are.

        `num_valid_blocks`: leading entries of the table that hold KV. `note_partly_filled` must have been called.
        """
        num_stripes = min(num_valid_blocks // self.num_groups, request.num_submitted_tokens // self.block_size)
        self.cache_blocks(request, num_stripes * self.block_size)
        return num_stripes

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
        """The number of blocks in the prefix cache, in both tiers."""
        return self.pool.num_cached_blocks + (self.host.pool.num_cached_blocks if self.host is not None else 0)

    def blocks_in_use(self) -> str:
        """A text that says which blocks are in use and why; empty when none is, and the prefix cache can be reset."""
        held = self.pool.accounts().holders
        if self.host is not None:
            host = self.host.pool
            held.append((host.num_total_blocks - host.num_free_blocks, "of the host tier"))
        return ", ".join(f"{count} {by_whom}" for count, by_whom in held if count)

    def num_slots(self, request_id: str) -> int:
        """How many tokens fit into a live request's blocks."""
        return len(self._tables[request_id].blocks) // self.num_groups * self.block_size

    def drop_unseen(self, request_id: str, num_computed_tokens: int) -> None:
        """Free a live request's blocks that no query from position `num_computed_tokens` on sees."""
        table, null, groups = self._tables[request_id], self.pool.null_block, self.num_groups
        for group, window in self._groups.windows:
            first, end = table.num_dropped_stripes[group], self._groups.first_seen(num_computed_tokens, window)
            if end > first:
                table_entries = table.blocks[first * groups + group : end * groups : groups]
                dropped = self._groups.without_null(table_entries)
                table.blocks[first * groups + group : end * groups : groups] = [null] * (end - first)
                table.num_dropped_stripes[group] = end
                if table.spare is None:
                    self.pool.free_blocks(dropped)
                else:
                    # Cache hits may be shared with other requests, so they are freed and not reused.
                    num_hits = max(0, table.num_hit_entries // groups - first)
                    own = self._groups.without_null(table_entries[num_hits:])
                    table.spare += own
                    self.pool.free_blocks(self._groups.without_null(table_entries[:num_hits]))

    def block_ids(self, request_id: str) -> list[int]:
        """The block ids of a live request's table, the null block's included; empty when it has no table."""
        table = self._tables.get(request_id)
        return [block.block_id for block in table.blocks] if table is not None else []

    def exchanged_block_ids(self, request: Request) -> list[int]:
        """The block ids of `num_exchanged_tokens`, with the null block for entries that no query from `next_query` on
        sees."""
        num_entries = -(-request.num_exchanged_tokens // self.block_size) * self.num_groups
        table = self._tables.get(request.request_id)
        block_ids = [block.block_id for block in table.blocks[:num_entries]] if table is not None else []
        if not self._groups.windows:
            return block_ids
        for entry in self._groups.unseen_entries(range(len(block_ids)), self.next_query(request)):
            block_ids[entry] = self.pool.null_block.block_id
        return block_ids

    def pin(self, holder: str, keys: Sequence[bytes]) -> list[int]:
        """Keep the longest cached prefix of these stripes for a reader, until `HeldBlocks.release` of the holder.

        Returns the ids of its blocks, the null block's where no query behind them sees one; if there are none nothing
        is kept.
        """
        blocks = self._groups.find(keys) if self._enable_caching else []
        kept = self._groups.without_null(blocks)
        if kept:
            self.pool.touch(kept)
            self.held.lease(holder, kept)
        return [block.block_id for block in blocks]

    def next_query(self, request: Request) -> int:
        """The position from which on queries may follow where what is loaded has KV: behind what is pulled or was
        computed when a move began, or that of the last submitted token, which other sequences compute again. These find
        no states behind the token before it, but behind a block."""
        if behind := request.pulled_end or request.seen_from:
            return behind
        last = request.num_submitted_tokens - 1
        return last // self.block_size * self.block_size if self._keeps_states and request.has_several else last

    def free(self, request_id: str) -> None:
        """Free a live request's blocks, on the device or in the host tier; does nothing when it has none."""
        table = self._tables.pop(request_id, None)
        if table is not None:
            self._end_growth(table)
            self.pool.free_blocks(self._groups.without_null(table.blocks))
        elif self.host is not None:
            self.host.drop(request_id)

    def num_computed_blocks(self, request: Request) -> int:
        """How many blocks of a request hold KV that later queries see."""
        num_stripes = -(-request.num_computed_tokens // self.block_size)
        unseen = sum(self._groups.first_seen(request.num_computed_tokens, window) for _, window in self._groups.windows)
        return num_stripes * self.num_groups - unseen

    def swap_out(self, request: Request) -> bool:
        """Move a request's KV to the host tier in the coming step; False, and nothing changes, if it does not fit.

        Nor is it moved while it has blocks that are filled only in part, which would be found there by their keys.
        """
        table, null = self._tables[request.request_id], self.pool.null_block
        num_stripes = -(-request.num_computed_tokens // self.block_size)
        if self.host is None or num_stripes == 0 or table.spare is not None:
            return False
        entries = table.blocks[: num_stripes * self.num_groups]
        if not self.pool.partly_filled.keys().isdisjoint(entries):
            return False
        keys = self._groups.entry_keys(request.block_hashes[: min(table.num_cached_stripes, num_stripes)])
        if not self.host.put(request.request_id, [None if block is null else block for block in entries], keys):
            return False
        del self._tables[request.request_id]
        self.pool.free_blocks(self._groups.without_null(table.blocks))
        return True

    def swap_in(self, request: Request, *, num_spared_blocks: int = 0) -> AllocationAnswer:
        """Move a request's KV back in the coming step, and allocate blocks for all its tokens; all or nothing.

        Blocks that are still in the device's prefix cache are not copied.
        """
        if self.host is None:
            raise ValueError("there is no host tier")
        swapped, null = self.host.table(request.request_id), self.pool.null_block
        num_full = request.num_computed_tokens // self.block_size
        sources: list[Block | None] = [
            self.pool.get_cached_block(key) for key in self._groups.entry_keys(request.block_hashes[:num_full])
        ]
        sources += [None] * (len(swapped) - len(sources))
        here = [null if host is None else block for host, block in zip(swapped, sources, strict=True)]
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

    def begin_step(self, step: int, *, is_empty: bool) -> StepCopies:
        """Note that a step was decided; returns its copies from and to the host tier.

        Until `settle`, blocks to which the step may write are not allocated again.
        """
        copies = self.host.begin_step(step) if self.host is not None else NO_COPIES
        if not is_empty or copies is not NO_COPIES:
            self.pool.raise_fence(step)
        return copies

    def settle(self, step: int, lost: bool) -> None:
        """Note that a step was computed, or was lost and may have copied nothing."""
        stored = self.host.settle(step, lost) if self.host is not None else []
        if stored and self.kv_events.is_recording:
            self.kv_events.record(BlockStored(stored, tier="host"))
        self.pool.lift_fence(step)

    def lease(self, request_id: str) -> None:
        """Turn the blocks of an ended request into a lease: a peer may read them until `HeldBlocks.release`.

        Does nothing when the request has no blocks.
        """
        table = self._tables.pop(request_id, None)
        if table is not None:
            self._end_growth(table)
            self.held.lease(request_id, self._groups.without_null(table.blocks))

    def quarantine(self, request_id: str, num_valid_stripes: int = 0) -> None:
        """Quarantine the blocks of an ended request, to which a transfer may still write, until `HeldBlocks.release`.

        Cache hits in front of the written blocks and lookahead blocks behind them are freed at once, and so are the
        first `num_valid_stripes`, which the transfer has filled. Does nothing when the request has no blocks.
        """
        table = self._tables.pop(request_id, None)
        if table is None:
            return
        end = table.num_hit_entries + table.num_filling_entries
        first = max(table.num_hit_entries, num_valid_stripes * self.num_groups)
        self.held.quarantine(request_id, self._groups.without_null(table.blocks[first:end]))
        self.pool.free_blocks(self._groups.without_null(table.blocks[:first] + table.blocks[end:]))

    def check_invariant(self) -> None:
        """Check the pools' accounts, and their counts against all tables; raises BlockInvariantBroken. O(blocks)."""
        self.pool.check_invariant()
        if self.host is not None:
            self.host.check_invariant()
        owners = Counter(
            block.block_id for table in self._tables.values() for block in self._groups.without_null(table.blocks)
        )
        owners.update(block.block_id for table in self._tables.values() for block in table.spare or ())
        owners.update(block.block_id for block in self.pool.fenced)
        leases, quarantines = self.held.counts()
        problems = [
            f"{block!r}: tables {owners[block.block_id]}, leases {leases[block.block_id]}, "
            f"quarantines {quarantines[block.block_id]}, of "
            f"{[name for name, table in self._tables.items() if block in table.blocks] + self.held.holders(block)}"
            for block in self.pool.blocks
            if (owners[block.block_id], leases[block.block_id], quarantines[block.block_id])
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

    def _end_growth(self, table: BlockTable) -> None:
        """Note that a growing table is complete, and free the blocks that it has in reserve."""
        if table.spare is not None:
            self.num_growing -= 1
            spare, table.spare = table.spare, None
            self.pool.free_blocks(spare)

    def _open_table(self, request_id: str, hits: Sequence[Block], num_external_tokens: int) -> BlockTable:
        blocks = list(hits)
        table = BlockTable(blocks, self.num_groups, -(-num_external_tokens // self.block_size))
        self.pool.touch(self._groups.without_null(blocks))
        self._tables[request_id] = table
        return table

    def _cache_group(self, request: Request, table: BlockTable, group: int, first: int, end: int) -> None:
        """Enter one group's blocks of the stripes [first, end) into the prefix cache."""
        null, groups, is_new, cache_block = self.pool.null_block, self.num_groups, False, self.pool.cache_block
        keys, blocks = request.block_hashes[first:end], table.blocks[first * groups + group : end * groups : groups]
        stored: list[bytes] = []
        partly_filled = self.pool.partly_filled
        for key, block in zip(keys, blocks, strict=True):
            if block is not null and block not in partly_filled:
                name = group_key(key, group) if group else key
                stored.append(name)
                is_new |= cache_block(block, name)
        if is_new and self.kv_events.is_recording:
            # Only the first entries can lack a block or a part of it, since windows only move forward.
            first = end - len(stored)
            parent = group_key(request.block_hashes[first - 1], group) if first else None
            size, wanted = self.block_size, self.kv_events.with_tokens
            tokens: Sequence[int] = request.token_ids(first * size, end * size) if wanted else ()
            self.kv_events.record(BlockStored(stored, parent, tokens, group))
