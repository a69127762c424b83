"""Every block is in exactly one account, and the least valuable blocks are allocated first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, precondition, rule

from baton.engine.kv_cache.block_pool import Block, BlockAccounts, BlockInvariantBroken, BlockPool, FreeBlockQueue


def ids(blocks: list[Block]) -> list[int]:
    return [block.block_id for block in blocks]


def key(number: int) -> bytes:
    return bytes([number]) * 32


def cached(pool: BlockPool, *keys: int) -> list[Block]:
    """Blocks with these keys, with one owner each."""
    blocks = pool.get_new_blocks(len(keys))
    for block, number in zip(blocks, keys, strict=True):
        assert pool.cache_block(block, key(number))
    return blocks


def test_the_free_list_pops_from_the_head_and_removes_from_the_middle() -> None:
    blocks = [Block(i) for i in range(4)]
    queue = FreeBlockQueue(blocks)
    queue.remove(blocks[2])
    assert queue.popleft(1) == [blocks[0]]
    queue.prepend(blocks[0])
    queue.append(blocks[2])
    assert ids(list(queue)) == [0, 1, 3, 2]
    assert len(queue) == 4


def test_the_free_list_refuses_to_add_a_block_twice_and_to_remove_an_absent_one() -> None:
    block = Block(0)
    queue = FreeBlockQueue([block])
    with pytest.raises(ValueError, match="already"):
        queue.append(block)
    queue.remove(block)
    with pytest.raises(ValueError, match="not on"):
        queue.remove(block)
    with pytest.raises(IndexError, match="1 blocks wanted, but the free list has 0"):
        queue.popleft(1)
    assert queue.popleft(0) == []


def test_the_free_list_pops_several_blocks_or_none() -> None:
    blocks = [Block(i) for i in range(5)]
    queue = FreeBlockQueue(blocks)
    with pytest.raises(IndexError):
        queue.popleft(6)
    assert (ids(list(queue)), len(queue)) == ([0, 1, 2, 3, 4], 5)
    assert queue.popleft(3) == blocks[:3]
    assert not any(block.is_on_free_list for block in blocks[:3])
    queue.prepend(blocks[1])
    assert (ids(list(queue)), len(queue)) == ([1, 3, 4], 3)
    assert queue.popleft(3) == [blocks[1], blocks[3], blocks[4]]
    queue.append(blocks[0])
    assert ids(list(queue)) == [0]


def test_the_null_block_is_never_allocated() -> None:
    pool = BlockPool(4)
    assert ids(pool.get_new_blocks(3)) == [1, 2, 3]
    with pytest.raises(ValueError, match="1 blocks wanted, but only 0 are free"):
        pool.get_new_blocks(1)


def test_fenced_blocks_are_freed_when_the_last_step_decided_by_then_is_committed() -> None:
    pool = BlockPool(6)
    first, second, third = pool.get_new_blocks(3)
    pool.raise_fence(1)
    pool.free_blocks([first])
    pool.raise_fence(2)
    pool.free_blocks([second])
    assert (pool.num_free_blocks, list(pool.fenced)) == (2, [first, second])
    pool.lift_fence(1)
    assert (pool.num_free_blocks, list(pool.fenced)) == (3, [second])
    pool.lift_fence(2)
    pool.free_blocks([third])
    assert (pool.num_free_blocks, list(pool.fenced)) == (5, [])
    pool.check_invariant()


def test_a_fenced_block_is_still_found_in_the_cache() -> None:
    pool = BlockPool(4)
    (block,) = cached(pool, 1)
    pool.raise_fence(1)
    pool.free_blocks([block])
    pool.touch([block])
    pool.lift_fence(1)
    assert (pool.get_cached_block(key(1)), block.owner_cnt) == (block, 1)
    pool.check_invariant()


def test_accounts_follow_a_block_through_its_life() -> None:
    pool = BlockPool(6)
    blocks = cached(pool, 1, 2)
    assert pool.accounts() == BlockAccounts(5, free=3, cached_idle=0, owned=2, leased=0, quarantined=0)
    pool.lease(blocks)
    assert pool.accounts() == BlockAccounts(5, free=3, cached_idle=0, owned=0, leased=2, quarantined=0)
    pool.touch(blocks[:1])
    assert pool.accounts() == BlockAccounts(5, free=3, cached_idle=0, owned=1, leased=1, quarantined=0)
    pool.end_lease(blocks)
    assert pool.accounts() == BlockAccounts(5, free=3, cached_idle=1, owned=1, leased=0, quarantined=0)
    pool.free_blocks(blocks[:1])
    assert pool.accounts() == BlockAccounts(5, free=3, cached_idle=2, owned=0, leased=0, quarantined=0)
    unhashed = pool.get_new_blocks(1)
    pool.quarantine(unhashed)
    assert pool.accounts() == BlockAccounts(5, free=2, cached_idle=2, owned=0, leased=0, quarantined=1)
    pool.end_quarantine(unhashed)
    assert pool.accounts() == BlockAccounts(5, free=3, cached_idle=2, owned=0, leased=0, quarantined=0)


def test_uncached_blocks_are_allocated_first_then_the_least_recently_used() -> None:
    pool = BlockPool(6)
    older, newer = cached(pool, 1, 2), cached(pool, 3, 4)
    pool.free_blocks(newer)
    pool.free_blocks(older)
    assert ids(pool.get_new_blocks(1)) == [5]
    pool.get_new_blocks(1)
    assert pool.get_cached_block(key(4)) is None, "of equals the longer prefix is lost first"
    assert pool.get_cached_block(key(3)) is newer[0]
    pool.get_new_blocks(1)
    assert pool.get_cached_block(key(3)) is None
    assert pool.get_cached_block(key(1)) is older[0]


def test_a_touched_block_is_not_evicted() -> None:
    pool = BlockPool(3)
    blocks = cached(pool, 1, 2)
    pool.free_blocks(blocks)
    pool.touch(blocks[1:])
    assert ids(pool.get_new_blocks(1)) == ids(blocks[:1])
    assert pool.get_cached_block(key(2)) is blocks[1]
    assert pool.num_free_blocks == 0


def test_allocated_blocks_are_contiguous_where_possible() -> None:
    pool = BlockPool(10)
    blocks = pool.get_new_blocks(9)
    pool.free_blocks([blocks[i] for i in (4, 0, 2, 1, 3)])
    assert ids(pool.get_new_blocks(5)) == [1, 2, 3, 4, 5]


def test_a_table_grows_into_the_blocks_behind_its_last_one() -> None:
    pool = BlockPool(10)
    pool.get_new_blocks(4)
    assert ids(pool.get_new_blocks(1)) == [5]
    assert ids(pool.get_new_blocks(2, after=pool.blocks[7])) == [8, 9]
    assert ids(pool.get_new_blocks(1, after=pool.blocks[9])) == [6], "nothing follows the last block"


def test_a_neighbouring_block_with_cached_kv_is_not_preferred() -> None:
    pool = BlockPool(6)
    blocks = cached(pool, 1, 2, 3)
    pool.free_blocks(blocks[1:])
    assert ids(pool.get_new_blocks(1, after=blocks[0])) == [4]
    assert pool.get_cached_block(key(2)) is blocks[1]


def test_only_one_block_is_cached_for_a_key() -> None:
    pool = BlockPool(4)
    first, second = pool.get_new_blocks(2)
    assert pool.cache_block(first, key(1))
    assert not pool.cache_block(second, key(1))
    assert not pool.cache_block(first, key(2))
    assert pool.get_cached_block(key(1)) is first
    assert second.block_hash is None


def test_a_shared_or_cached_block_can_not_be_quarantined() -> None:
    pool = BlockPool(4)
    (findable,) = cached(pool, 1)
    with pytest.raises(ValueError, match="has another holder or is in the prefix cache"):
        pool.quarantine([findable])
    (shared,) = pool.get_new_blocks(1)
    pool.touch([shared])
    with pytest.raises(ValueError, match="has another holder or is in the prefix cache"):
        pool.quarantine([shared])
    assert pool.num_quarantined_blocks == 0


def test_reset_refuses_while_a_block_is_held() -> None:
    pool = BlockPool(4)
    blocks = cached(pool, 1, 2)
    pool.free_blocks(blocks[:1])
    assert not pool.reset_prefix_cache()
    assert pool.get_cached_block(key(1)) is blocks[0]
    pool.free_blocks(blocks[1:])
    assert pool.reset_prefix_cache()
    assert pool.get_cached_block(key(1)) is None
    assert pool.accounts() == BlockAccounts(3, free=3, cached_idle=0, owned=0, leased=0, quarantined=0)


def test_a_pool_needs_more_than_the_null_block() -> None:
    with pytest.raises(ValueError, match="null block"):
        BlockPool(1)


def set_of(block: int, name: str, value: object) -> Callable[[BlockPool], None]:
    return lambda pool: setattr(pool.blocks[block], name, value)


def unlist(pool: BlockPool) -> None:
    block = pool.blocks[4]
    assert block.prev_free is not None
    block.prev_free.next_free = block.next_free


@pytest.mark.parametrize(
    ("damage", "story"),
    [
        (set_of(2, "owner_cnt", 0), "Block 2 .*lost"),
        (set_of(2, "owner_cnt", -1), "Block 2 .*too often"),
        (set_of(4, "owner_cnt", 1), "Block 4 .*held but free"),
        (set_of(1, "block_hash", key(9)), "the index has 01010101 for <Block 1"),
        (set_of(4, "block_hash", key(9)), "2 blocks have a key, the index has 1"),
        (lambda pool: setattr(pool.blocks[5], "prev_free", pool.blocks[5]), "torn after <Block 4"),
        (unlist, "the free list has 1 blocks, not 2.*Block 4 .*lost"),
        (set_of(2, "quarantined", True), "Block 2 .*quarantined and in use"),
        (set_of(0, "owner_cnt", 1), "null block is in use"),
    ],
)
def test_the_invariant_check_names_each_contradiction(
    damage: Callable[[BlockPool], None], story: str, block_accounts_agree: list[Any]
) -> None:
    pool = BlockPool(6)
    cached(pool, 1)
    pool.get_new_blocks(2)
    pool.check_invariant()
    damage(pool)
    with pytest.raises(BlockInvariantBroken, match=story):
        pool.check_invariant()
    block_accounts_agree.clear()


class PoolMachine(RuleBasedStateMachine):
    """Compares owners, leases and quarantines with a model that only remembers the lists that it was given."""

    owned: Bundle[list[Block]] = Bundle("owned")
    leased: Bundle[list[Block]] = Bundle("leased")
    quarantined: Bundle[list[Block]] = Bundle("quarantined")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12)
        self.held = 0

    @rule(target=owned, count=st.integers(1, 6), after=st.integers(0, 11))
    def take(self, count: int, after: int) -> Any:
        if count > self.pool.num_free_blocks:
            return multiple()
        worthless = self.pool.accounts().free
        before = {block.block_hash for block in self.pool.blocks if block.block_hash}
        blocks = self.pool.get_new_blocks(count, after=self.pool.blocks[after])
        kept = {block.block_hash for block in self.pool.blocks if block.block_hash}
        assert len(before) - len(kept) == max(0, count - worthless), "cached KV is lost only when it must be"
        assert len({block.block_id for block in blocks}) == count
        self.held += 1
        return blocks

    @rule(target=owned, first=st.integers(0, 20), count=st.integers(1, 3))
    def hit(self, first: int, count: int) -> Any:
        found = [self.pool.get_cached_block(key(number)) for number in range(first, first + count)]
        blocks = [block for block in found if block is not None]
        if not blocks:
            return multiple()
        self.pool.touch(blocks)
        self.held += 1
        return blocks

    @rule(blocks=owned, number=st.integers(0, 20))
    def enter(self, blocks: list[Block], number: int) -> None:
        if blocks[0].owner_cnt and not blocks[0].quarantined:
            self.pool.cache_block(blocks[0], key(number))

    @rule(blocks=consumes(owned))
    def free(self, blocks: list[Block]) -> None:
        self.pool.free_blocks(blocks)
        self.held -= 1

    @rule(target=leased, blocks=consumes(owned))
    def lease(self, blocks: list[Block]) -> list[Block]:
        self.pool.lease(blocks)
        return blocks

    @rule(blocks=consumes(leased))
    def end_lease(self, blocks: list[Block]) -> None:
        self.pool.end_lease(blocks)
        self.held -= 1

    @rule(target=quarantined, blocks=consumes(owned))
    def quarantine(self, blocks: list[Block]) -> Any:
        if any(block.ref_cnt != 1 or block.block_hash for block in blocks):
            self.pool.free_blocks(blocks)
            self.held -= 1
            return multiple()
        self.pool.quarantine(blocks)
        return blocks

    @rule(blocks=consumes(quarantined))
    def end_quarantine(self, blocks: list[Block]) -> None:
        self.pool.end_quarantine(blocks)
        self.held -= 1

    @precondition(lambda self: self.held == 0)
    @rule()
    def reset(self) -> None:
        assert self.pool.reset_prefix_cache()

    @invariant()
    def books_agree(self) -> None:
        self.pool.check_invariant()
        assert (self.pool.num_free_blocks == self.pool.num_total_blocks) == (self.held == 0)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40)
