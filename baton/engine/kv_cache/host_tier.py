"""The host tier: a second pool of blocks, in host memory, and the copies of each step between it and the device.

It keeps the KV of preempted requests and, in the blocks that are left, what the device's prefix cache had to evict.

The runner makes a step's copies before it computes the step: first all copies out, then all copies in. Three rules keep
them correct:
  - a host block that a step reads or writes is held until that step has been computed (`settle`), so it is not
    allocated again meanwhile;
  - a host block can be found by its key only after the step that filled it was computed;
  - a host block that a lost step was to fill is treated as if it had never been filled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.engine.batch import BlockCopy
from baton.engine.kv_cache.block_pool import Block, BlockInvariantBroken, BlockPool


@dataclass(slots=True)
class StepCopies:
    """The copies of one step, and the host blocks that it holds for them."""

    swap_out: list[BlockCopy] = field(default_factory=list)
    """From a device block to a host block."""
    swap_in: list[BlockCopy] = field(default_factory=list)
    """From a host block to a device block."""
    held: list[Block] = field(default_factory=list)
    """Host blocks that the step reads or writes."""
    filled: dict[bytes, Block] = field(default_factory=dict)
    """Those of the held blocks that get a key once the step was computed, by that key."""


NO_COPIES = StepCopies()


class HostTier:
    """The host blocks of swapped requests and of the prefix cache. `num_blocks` includes the null block 0."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self._tables: dict[str, list[Block | None]] = {}
        self._next = StepCopies()
        self._unsettled: dict[int, StepCopies] = {}

    def put(self, request_id: str, blocks: Sequence[Block | None], keys: Sequence[bytes]) -> bool:
        """Copy a request's blocks out in the coming step; False, and nothing changes, when they don't fit.

        `blocks`: the request's table, with None for the null block. `keys`: the keys of its first entries; a block that
        the host tier has under its key is not copied again.
        """
        sources = [self.pool.get_cached_block(key) for key in keys]
        sources += [None] * (len(blocks) - len(sources))
        sources = [None if source is None else host for source, host in zip(blocks, sources, strict=True)]
        here = [block for block in sources if block is not None]
        missing = sum([block is not None for block in blocks]) - len(here)
        if missing + sum([block.is_on_free_list for block in here]) > self.pool.num_free_blocks:
            return False
        self.pool.touch(here)
        taken = self.pool.get_new_blocks(missing)
        self.hold(taken)
        fresh = iter(taken)
        table: list[Block | None] = []
        for index, (source, host) in enumerate(zip(blocks, sources, strict=True)):
            if source is not None and host is None:
                host = next(fresh)
                self._copy_out(source, host, keys[index] if index < len(keys) else None)
            table.append(host)
        self._tables[request_id] = table
        return True

    def num_blocks(self, request_id: str) -> int:
        """How many host blocks a request has."""
        return sum(block is not None for block in self._tables.get(request_id, ()))

    def table(self, request_id: str) -> Sequence[Block | None]:
        """A request's host blocks, None where its table had the null block; must not be changed."""
        return self._tables[request_id]

    def fetch(self, request_id: str, targets: Sequence[Block | None]) -> None:
        """Copy a request's host blocks to the device in the coming step, and drop its table here.

        `targets`: the device block for each entry of its table; None for an entry that is not copied.
        """
        table = self._tables.pop(request_id)
        for host, target in zip(table, targets, strict=True):
            if host is not None:
                self._next.held.append(host)
                if target is not None:
                    self._next.swap_in.append(BlockCopy(host.block_id, target.block_id))

    def keep(self, evicted: Sequence[tuple[Block, bytes]]) -> None:
        """Copy blocks that the device's cache evicts out in the coming step, unless the host tier has them.

        They replace idle host blocks, as far as there are any.
        """
        coming, here = self._next.filled, self.pool.keys
        missing = [(block, key) for block, key in evicted if key not in coming and key not in here]
        # The step is their only owner.
        fresh = self.pool.get_new_blocks(min(len(missing), self.pool.num_free_blocks))
        self._next.held += fresh
        for (block, key), host in zip(missing, fresh, strict=False):
            self._copy_out(block, host, key)

    def find(self, keys: Sequence[bytes]) -> list[Block]:
        """The host blocks of the longest prefix of `keys` that is here. They may be evicted unless they are held."""
        blocks: list[Block] = []
        for key in keys:
            block = self.pool.get_cached_block(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def hold(self, blocks: Sequence[Block]) -> None:
        """Keep blocks until the coming step is settled."""
        self.pool.touch(blocks)
        self._next.held += blocks

    def copy_in(self, blocks: Sequence[Block], targets: Sequence[Block]) -> None:
        """Copy held blocks to the first ones of `targets` in the coming step."""
        for host, target in zip(blocks, targets, strict=False):
            self._next.swap_in.append(BlockCopy(host.block_id, target.block_id))

    def drop(self, request_id: str) -> None:
        """Forget a request's blocks; nothing when it has none."""
        table = self._tables.pop(request_id, None)
        if table is not None:
            self.pool.free_blocks([block for block in table if block is not None])

    def begin_step(self, step: int) -> StepCopies:
        """The copies of the step that is about to be computed; `settle` ends them."""
        copies = self._next
        if not copies.held:
            return NO_COPIES
        self._unsettled[step] = copies
        self._next = StepCopies()
        return copies

    def settle(self, step: int, lost: bool) -> list[bytes]:
        """Note that a step was computed, or was lost and may have copied nothing. Unknown steps are skipped.

        Returns the keys of blocks that can be found from now on.
        """
        copies = self._unsettled.pop(step, None)
        if copies is None:
            return []
        filled = {} if lost else copies.filled
        named = [key for key, block in filled.items() if self.pool.cache_block(block, key)]
        self.pool.free_blocks(copies.held)
        return named

    def check_invariant(self) -> None:
        """Check the pool's accounts and its counts against tables and steps; raises BlockInvariantBroken. O(blocks)."""
        self.pool.check_invariant()
        holds = Counter(block.block_id for table in self._tables.values() for block in table if block is not None)
        for copies in (self._next, *self._unsettled.values()):
            holds.update(block.block_id for block in copies.held)
        problems = [
            f"{block!r}: {holds[block.block_id]} tables and steps"
            for block in self.pool.blocks
            if holds[block.block_id] != block.owner_cnt
        ]
        if problems:
            raise BlockInvariantBroken(f"host blocks: {'; '.join(problems)}")

    def _copy_out(self, source: Block, host: Block, key: bytes | None) -> None:
        self._next.swap_out.append(BlockCopy(source.block_id, host.block_id))
        if key is not None:
            self._next.filled.setdefault(key, host)
