"""The host tier's books: all or nothing, held while a step needs a block, found only when it was filled."""

from __future__ import annotations

import pytest

from baton.engine.batch import BlockCopy
from baton.engine.kv_cache.block_pool import Block, BlockInvariantBroken
from baton.engine.kv_cache.host_tier import NO_COPIES, HostTier

KEYS = [bytes([number]) * 32 for number in range(8)]


def device(*block_ids: int) -> list[Block]:
    return [Block(block_id) for block_id in block_ids]


def test_blocks_go_out_and_come_back() -> None:
    tier = HostTier(9)
    assert tier.put("r", device(5, 7), [])
    assert tier.begin_step(1).swap_out == [BlockCopy(5, 1), BlockCopy(7, 2)]
    tier.settle(1, lost=False)
    assert tier.num_blocks("r") == 2
    tier.fetch("r", [None, *device(4)])
    assert tier.begin_step(2).swap_in == [BlockCopy(2, 4)]
    assert tier.pool.num_free_blocks == 6, "the step has not read them yet"
    tier.check_invariant()
    tier.settle(2, lost=False)
    assert (tier.pool.num_free_blocks, tier.num_blocks("r")) == (8, 0)
    tier.check_invariant()


def test_without_room_nothing_changes() -> None:
    tier = HostTier(4)
    assert not tier.put("r", device(1, 2, 3, 4), KEYS[:4])
    assert tier.begin_step(1) is NO_COPIES
    assert tier.pool.num_free_blocks == 3
    assert tier.put("r", device(1, 2, 3), [])


@pytest.mark.parametrize("lost", [False, True])
def test_a_block_has_its_name_once_it_was_filled(lost: bool) -> None:
    tier = HostTier(9)
    tier.put("r", device(1, 2), KEYS[:1])
    tier.begin_step(1)
    assert tier.pool.get_cached_block(KEYS[0]) is None
    tier.settle(1, lost)
    assert (tier.pool.get_cached_block(KEYS[0]) is None) == lost
    tier.drop("r")
    assert tier.pool.accounts().cached_idle == (0 if lost else 1)
    tier.check_invariant()


def test_a_block_that_is_already_here_is_shared_and_not_copied_again() -> None:
    tier = HostTier(5)
    tier.put("first", device(1, 2), KEYS[:2])
    tier.begin_step(1)
    tier.settle(1, lost=False)
    assert tier.put("second", device(3, 4, 5), KEYS[:2])
    assert tier.begin_step(2).swap_out == [BlockCopy(5, 3)]
    tier.settle(2, lost=False)
    tier.drop("first")
    tier.fetch("second", device(6, 7, 8))
    assert tier.begin_step(3).swap_in == [BlockCopy(1, 6), BlockCopy(2, 7), BlockCopy(3, 8)]


def test_idle_blocks_make_room_but_not_those_a_request_shares() -> None:
    tier = HostTier(4)
    tier.put("first", device(1, 2), KEYS[:2])
    tier.begin_step(1)
    tier.settle(1, lost=False)
    tier.drop("first")
    assert not tier.put("second", device(1, 3, 4, 5), KEYS[:1]), "one is shared, two are left, three are needed"
    assert tier.put("second", device(1, 3, 4), KEYS[:1])
    assert tier.pool.get_cached_block(KEYS[1]) is None
    tier.check_invariant()


def test_a_step_is_settled_once_and_may_have_copied_nothing() -> None:
    tier = HostTier(4)
    tier.put("r", device(1), [])
    tier.drop("r")
    tier.begin_step(1)
    tier.settle(1, lost=False)
    tier.settle(1, lost=False)
    tier.settle(7, lost=True)
    assert tier.pool.num_free_blocks == 3


def test_a_lost_count_is_found() -> None:
    tier = HostTier(4)
    tier.put("r", device(1), [])
    tier.pool.touch(tier.pool.blocks[1:2])
    with pytest.raises(BlockInvariantBroken, match="host blocks"):
        tier.check_invariant()
