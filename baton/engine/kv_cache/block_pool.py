"""All KV blocks of an engine and their holders: reference counts, the free list, the prefix cache's index.

Every block but the null block is in exactly one account:
  free          it has no holder, and no KV that can be found
  cached-idle   it has no holder, but its KV is in the index: it can be found until the block is allocated again
  owned         it is in a live request's table (and may be leased besides)
  leased        only ended requests hold it, for a peer that may still read it
  quarantined   an ended request's transfer may still write to it; it is in no table, no index, no list
The blocks of the first two accounts are on the free list, from which blocks are allocated.

Fence: steps that were decided and are not committed may still write to the blocks that their requests had, even if the
requests have ended. The runner computes steps in order, so such a block can safely be given to a later step; but a load
from another node begins when it is decided, and is not in that order. So while a step is in flight, blocks that are
freed, or whose lease ends, stay owned until the last step decided by then is committed. Quarantined blocks come free at
once: no step writes to them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from baton.errors import BatonError
from baton.messages.kv_cache import NULL_BLOCK

_BLOCK_ID = attrgetter("block_id")


class BlockInvariantBroken(BatonError):
    """The pool's accounts are inconsistent; the message lists every contradiction."""


class Block:
    """One block's state. Only the pool writes to it."""

    __slots__ = ("block_hash", "block_id", "lease_cnt", "next_free", "owner_cnt", "prev_free", "quarantined")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.owner_cnt = 0
        """Number of tables of live requests that have the block."""
        self.lease_cnt = 0
        """Number of ended requests that hold the block for a reader."""
        self.quarantined = False
        self.block_hash: bytes | None = None
        self.prev_free: Block | None = None
        self.next_free: Block | None = None

    @property
    def ref_cnt(self) -> int:
        return self.owner_cnt + self.lease_cnt + self.quarantined

    @property
    def is_on_free_list(self) -> bool:
        return self.next_free is not None

    def __repr__(self) -> str:
        key = self.block_hash.hex()[:8] if self.block_hash else "-"
        flags = " quarantined" if self.quarantined else ""
        listed = " listed" if self.is_on_free_list else ""
        return f"<Block {self.block_id} owners={self.owner_cnt} leases={self.lease_cnt} key={key}{flags}{listed}>"


class FreeBlockQueue:
    """Doubly linked list through the blocks themselves: O(1) at both ends and from the middle. Head goes first."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._head = Block(-1)
        self._tail = Block(-2)
        self._head.next_free = self._tail
        self._tail.prev_free = self._head
        self.length = 0
        """The same as `len()`, which takes several times as long: for frequent reads."""
        for block in blocks:
            self.append(block)

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Block]:
        """Head to tail. Stops at a broken link."""
        block = self._head.next_free
        while block is not None and block is not self._tail:
            yield block
            block = block.next_free

    def append(self, block: Block) -> None:
        """Put a block at the tail, where it is taken last."""
        last = self._tail.prev_free
        assert last is not None
        self._link(last, block, self._tail)

    def prepend(self, block: Block) -> None:
        """Put a block at the head, where it is taken next."""
        first = self._head.next_free
        assert first is not None
        self._link(self._head, block, first)

    def popleft(self, count: int) -> list[Block]:
        """Remove and return `count` blocks from the head; raises IndexError and takes none when there are fewer."""
        if count > self.length:
            raise IndexError(f"{count} blocks wanted, but the free list has {self.length}")
        taken: list[Block] = []
        block = self._head.next_free
        for _ in range(count):
            assert block is not None
            taken.append(block)
            after = block.next_free
            block.prev_free = block.next_free = None
            block = after
        if taken:
            assert block is not None
            self._head.next_free, block.prev_free = block, self._head
            self.length -= count
        return taken

    def remove(self, block: Block) -> None:
        """Remove a block from any place in the list; raises ValueError when it is not on the list."""
        before, after = block.prev_free, block.next_free
        if before is None or after is None:
            raise ValueError(f"{block!r} is not on the free list")
        before.next_free, after.prev_free = after, before
        block.prev_free = block.next_free = None
        self.length -= 1

    def _link(self, before: Block, block: Block, after: Block) -> None:
        if block.next_free is not None:
            raise ValueError(f"{block!r} is on the free list already")
        before.next_free = after.prev_free = block
        block.prev_free, block.next_free = before, after
        self.length += 1


@dataclass(frozen=True, slots=True)
class BlockAccounts:
    """How many blocks are in each account. The null block is in none."""

    total: int
    free: int
    cached_idle: int
    owned: int
    leased: int
    quarantined: int

    @property
    def holders(self) -> list[tuple[int, str]]:
        """How many blocks are in use for each reason."""
        return [
            (self.owned, "held by requests or a step that has not ended"),
            (self.leased, "offered to decode nodes"),
            (self.quarantined, "that a transfer may still write to"),
        ]


class BlockPool:
    """The blocks of one engine. `num_blocks` counts the null block 0, which is never handed out."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError("a pool needs the null block and at least one more")
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.null_block = self.blocks[NULL_BLOCK]
        self._free = FreeBlockQueue(self.blocks[1:])
        self._index: dict[bytes, Block] = {}
        self._num_cached_idle = 0
        self._num_leased = 0
        self._num_quarantined = 0
        self._fence: int | None = None
        """The last step in flight; None: there is none."""
        self._fenced: deque[tuple[int, Sequence[Block]]] = deque()
        """Blocks that were freed while a step was in flight, and the step whose commit they wait for."""
        self.partly_filled: dict[Block, int] = {}
        """Blocks whose first tokens have no KV, and the position from which on no query sees those tokens. They are
        never entered into the prefix cache, and are forgotten here when they are allocated again."""
        self.on_evict: Callable[[Sequence[tuple[Block, bytes]]], None] | None = None
        """Called with the blocks that lost their keys to an allocation, before anything is written to them."""

    @property
    def keys(self) -> Collection[bytes]:
        """The keys of all blocks in the prefix cache."""
        return self._index.keys()

    @property
    def num_cached_blocks(self) -> int:
        """The number of blocks in the prefix cache."""
        return len(self._index)

    @property
    def num_total_blocks(self) -> int:
        """Blocks that can be handed out at all."""
        return len(self.blocks) - 1

    @property
    def num_free_blocks(self) -> int:
        """Blocks that an allocation could take now, idle cached ones included."""
        return self._free.length

    @property
    def num_leased_blocks(self) -> int:
        return self._num_leased

    @property
    def num_quarantined_blocks(self) -> int:
        return self._num_quarantined

    def accounts(self) -> BlockAccounts:
        """The number of blocks in each account, in O(1)."""
        listed = len(self._free)
        return BlockAccounts(
            total=self.num_total_blocks,
            free=listed - self._num_cached_idle,
            cached_idle=self._num_cached_idle,
            owned=self.num_total_blocks - listed - self._num_leased - self._num_quarantined,
            leased=self._num_leased,
            quarantined=self._num_quarantined,
        )

    def get_cached_block(self, key: bytes) -> Block | None:
        """The block with this key, or None. It may be idle: touch it before anything is taken."""
        return self._index.get(key)

    def get_new_blocks(self, num_blocks: int, after: Block | None = None) -> list[Block]:
        """Take blocks for one owner and evict what was cached in them; raises ValueError when there are not enough.

        Prefers contiguous blocks where that evicts nothing more: first the blocks that follow `after`, as long as they
        are free and not cached, then those at the head of the free list (the least recently used), sorted by id.
        """
        if num_blocks > self._free.length:
            raise ValueError(f"{num_blocks} blocks wanted, but only {len(self._free)} are free")
        taken: list[Block] = []
        if after is not None:
            neighbour = after.block_id + 1
            for block in self.blocks[neighbour : neighbour + num_blocks]:
                if block.next_free is None or block.block_hash is not None:
                    break
                self._free.remove(block)
                taken.append(block)
        if len(taken) < num_blocks:
            rest = self._free.popleft(num_blocks - len(taken))
            if len(rest) > 1:
                rest.sort(key=_BLOCK_ID)
            taken += rest
        evicted: list[tuple[Block, bytes]] = []
        for block in taken:
            if block.block_hash is not None:
                evicted.append((block, block.block_hash))
                del self._index[block.block_hash]
                block.block_hash = None
                self._num_cached_idle -= 1
            block.owner_cnt = 1
        if self.partly_filled:
            for block in taken:
                self.partly_filled.pop(block, None)
        if evicted and self.on_evict is not None:
            self.on_evict(evicted)
        return taken

    def touch(self, blocks: Iterable[Block]) -> None:
        """Add an owner to blocks found in the index."""
        for block in blocks:
            if block.owner_cnt == 0:
                if block.lease_cnt:
                    self._num_leased -= 1
                else:
                    self._free.remove(block)
                    self._num_cached_idle -= block.block_hash is not None
            block.owner_cnt += 1

    def free_blocks(self, blocks: Sequence[Block]) -> None:
        """Free an owner's blocks, given in table order; while a step is in flight, when that step is committed.

        They are freed from the end: of equally old blocks, the one with the longer prefix is evicted first.
        """
        if self._fence is not None:
            self._fenced.append((self._fence, blocks))
        else:
            self._drop_owner(blocks)

    def raise_fence(self, step: int) -> None:
        """Note that a step was decided: blocks that are freed from now on wait for its commit."""
        self._fence = step

    def lift_fence(self, step: int) -> None:
        """Note that this step and all before it are committed."""
        if self._fence == step:
            self._fence = None
        while self._fenced and self._fenced[0][0] <= step:
            self._drop_owner(self._fenced.popleft()[1])

    @property
    def fenced(self) -> Iterator[Block]:
        """Blocks that wait for the commit of a step, once for each owner that freed them."""
        return (block for _, blocks in self._fenced for block in blocks)

    def _drop_owner(self, blocks: Sequence[Block]) -> None:
        for block in reversed(blocks):
            block.owner_cnt -= 1
            if block.owner_cnt == 0:
                if block.lease_cnt:
                    self._num_leased += 1
                else:
                    self._put_back(block)

    def cache_block(self, block: Block, key: bytes) -> bool:
        """Enter a full, computed block into the prefix cache.

        False if it has a key, another block has this key, or only a part of the block was filled.
        """
        if block.block_hash is not None or key in self._index or block in self.partly_filled:
            return False
        block.block_hash = key
        self._index[key] = block
        return True

    def lease(self, blocks: Sequence[Block]) -> None:
        """Turn one owner's hold into a lease; the blocks stay in the index."""
        for block in blocks:
            block.owner_cnt -= 1
            block.lease_cnt += 1
            self._num_leased += block.owner_cnt == 0

    def end_lease(self, blocks: Sequence[Block]) -> None:
        """End one lease on each of these blocks, given in table order."""
        # The lease becomes ownership and is freed like it: an aborted leg may have a step in flight.
        for block in blocks:
            self._num_leased -= block.owner_cnt == 0
            block.lease_cnt -= 1
            block.owner_cnt += 1
        self.free_blocks(blocks)

    def quarantine(self, blocks: Sequence[Block]) -> None:
        """Turn the only owner's hold into quarantine.

        Raises ValueError for a block that has another holder or is in the prefix cache.
        """
        for block in blocks:
            if block.owner_cnt != 1 or block.lease_cnt or block.block_hash is not None:
                raise ValueError(f"{block!r} can't be quarantined: it has another holder or is in the prefix cache")
        for block in blocks:
            block.owner_cnt = 0
            block.quarantined = True
        self._num_quarantined += len(blocks)

    def end_quarantine(self, blocks: Sequence[Block]) -> None:
        """Free quarantined blocks, to which no transfer can write any more."""
        for block in reversed(blocks):
            block.quarantined = False
            self._put_back(block)
        self._num_quarantined -= len(blocks)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached KV. False, and nothing changes, while any block is held."""
        if len(self._free) != self.num_total_blocks:
            return False
        for block in self._index.values():
            block.block_hash = None
        self._index.clear()
        self._num_cached_idle = 0
        return True

    def check_invariant(self) -> None:
        """Compare all accounts with a full scan; raises BlockInvariantBroken. O(blocks)."""
        problems = [*self._list_problems(), *self._index_problems(), *self._account_problems()]
        if problems:
            raise BlockInvariantBroken(f"block pool: {'; '.join(problems)}; the pool counts {self.accounts()}")

    def _put_back(self, block: Block) -> None:
        if block.block_hash is None:
            self._free.prepend(block)
        else:
            self._free.append(block)
            self._num_cached_idle += 1

    def _list_problems(self) -> Iterator[str]:
        listed: set[int] = set()
        for block in self._free:
            if block.block_id in listed:
                yield f"{block!r} is twice on the free list"
                return
            listed.add(block.block_id)
            if block.next_free is None or block.next_free.prev_free is not block:
                yield f"the free list is torn after {block!r}"
        if len(listed) != len(self._free):
            yield f"the free list has {len(listed)} blocks, not {len(self._free)}"
        for block in self.blocks[1:]:
            if (block.ref_cnt == 0) != (block.block_id in listed):
                yield f"{block!r} is {'held but free' if block.ref_cnt else 'lost'}"
        if self.null_block.ref_cnt or 0 in listed or self.null_block.block_hash is not None:
            yield f"the null block is in use: {self.null_block!r}"

    def _index_problems(self) -> Iterator[str]:
        for key, block in self._index.items():
            if block.block_hash != key:
                yield f"the index has {key.hex()[:8]} for {block!r}"
        hashed = sum(block.block_hash is not None for block in self.blocks)
        if hashed != len(self._index):
            yield f"{hashed} blocks have a key, the index has {len(self._index)}"

    def _account_problems(self) -> Iterator[str]:
        for block in self.blocks:
            if block.owner_cnt < 0 or block.lease_cnt < 0:
                yield f"{block!r} was freed too often"
            if block.quarantined and (block.ref_cnt != 1 or block.block_hash is not None):
                yield f"{block!r} is quarantined and in use"
        scanned = BlockAccounts(
            total=len(self.blocks) - 1,
            free=sum(block.ref_cnt == 0 and block.block_hash is None for block in self.blocks[1:]),
            cached_idle=sum(block.ref_cnt == 0 and block.block_hash is not None for block in self.blocks[1:]),
            owned=sum(block.owner_cnt > 0 for block in self.blocks),
            leased=sum(block.owner_cnt == 0 and block.lease_cnt > 0 for block in self.blocks),
            quarantined=sum(block.quarantined for block in self.blocks),
        )
        if scanned != self.accounts():
            yield f"a scan finds {scanned}"
