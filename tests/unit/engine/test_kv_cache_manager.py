"""All or nothing, held before taken, findable only once computed."""

from __future__ import annotations

import pytest

from baton.engine.kv_cache.block_hash import BlockHasher, CacheKeyFields
from baton.engine.kv_cache.block_pool import BlockAccounts, BlockInvariantBroken, BlockPool
from baton.engine.kv_cache.block_table import AllocationAnswer
from baton.engine.kv_cache.manager import KVCacheManager
from baton.engine.request import Request
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams

OK, LATER, NEVER = AllocationAnswer.OK, AllocationAnswer.LATER, AllocationAnswer.NEVER


def manager_of(num_blocks: int, *, caching: bool = True) -> KVCacheManager:
    hasher = BlockHasher(CacheKeyFields("model", "float32", "layout"), 4)
    return KVCacheManager(BlockPool(num_blocks), hasher, 4, enable_caching=caching)


def request_of(name: str, num_tokens: int, *, first: int = 0, salt: str = "") -> Request:
    return Request(name, RequestSpec(range(first, first + num_tokens), SamplingParams(), cache_salt=salt))


def compute(manager: KVCacheManager, request: Request) -> None:
    """Admit a request with its cache hits and commit all its tokens."""
    computed = manager.get_computed_blocks(request)
    missing = request.num_tokens - computed.num_tokens
    assert manager.allocate_slots(request, missing, computed=computed).answer is OK
    request.num_computed_tokens = request.num_tokens
    manager.cache_blocks(request, request.num_tokens)


def free_blocks(manager: KVCacheManager) -> int:
    return manager.pool.num_free_blocks


def test_slots_come_in_whole_blocks_and_only_when_needed() -> None:
    manager, request = manager_of(8), request_of("r", 5)
    assert manager.allocate_slots(request, 5).new_block_ids == [1, 2]
    request.num_computed_tokens = 5
    for _ in range(3):
        assert manager.allocate_slots(request, 1).new_block_ids == ()
        request.num_computed_tokens += 1
    assert manager.allocate_slots(request, 1).new_block_ids == [3]
    assert manager.block_ids("r") == [1, 2, 3]


def test_lookahead_reserves_slots() -> None:
    manager = manager_of(8)
    assert len(manager.allocate_slots(request_of("r", 4), 4, num_lookahead_tokens=1).new_block_ids) == 2


def test_a_call_that_fails_changes_nothing() -> None:
    manager = manager_of(6)
    compute(manager, request_of("first", 8))
    manager.free("first")
    manager.allocate_slots(request_of("other", 8, first=50), 8)
    newcomer = request_of("newcomer", 20)
    computed = manager.get_computed_blocks(newcomer)
    before = manager.pool.accounts()
    assert computed.num_tokens == 8
    assert manager.allocate_slots(newcomer, 12, computed=computed).answer is LATER
    assert manager.pool.accounts() == before == BlockAccounts(5, 1, 2, 2, 0, 0)
    assert manager.block_ids("newcomer") == []


def test_idle_hits_are_not_counted_as_room_for_the_rest() -> None:
    """Three free blocks, two of them the hits themselves: two more do not fit, one does."""
    manager = manager_of(4)
    compute(manager, request_of("first", 8))
    manager.free("first")
    for num_tokens, answer in ((16, NEVER), (12, OK)):
        newcomer = request_of(f"newcomer{num_tokens}", num_tokens)
        computed = manager.get_computed_blocks(newcomer)
        assert computed.num_tokens == 8
        assert manager.allocate_slots(newcomer, num_tokens - 8, computed=computed).answer is answer
    assert free_blocks(manager) == 0
    assert manager.block_ids("newcomer12")[:2] == [1, 2]


def test_later_turns_into_ok_and_never_does_not() -> None:
    manager = manager_of(4)
    manager.allocate_slots(request_of("first", 8), 8)
    second = request_of("second", 8)
    assert manager.allocate_slots(second, 8).answer is LATER
    assert manager.allocate_slots(request_of("huge", 13), 13).answer is NEVER
    manager.free("first")
    assert manager.allocate_slots(second, 8).answer is OK


def test_spared_blocks_stay_free() -> None:
    manager = manager_of(4)
    assert manager.allocate_slots(request_of("r", 8), 8, num_spared_blocks=2).answer is LATER
    assert manager.allocate_slots(request_of("r", 8), 8, num_spared_blocks=1).answer is OK


@pytest.mark.parametrize(
    ("num_tokens", "hit"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12), (16, 12), (17, 12)]
)
def test_the_longest_cached_prefix_leaves_a_token_to_compute(num_tokens: int, hit: int) -> None:
    manager = manager_of(12)
    compute(manager, request_of("first", 13))
    assert manager.get_computed_blocks(request_of("second", num_tokens)).num_tokens == hit


def test_a_hole_ends_the_prefix() -> None:
    manager = manager_of(12)
    compute(manager, request_of("first", 12))
    other = Request("other", RequestSpec([0, 1, 2, 3, 99, 5, 6, 7, 8, 9, 10, 11, 12], SamplingParams()))
    assert manager.get_computed_blocks(other).num_tokens == 4


def test_tenants_share_no_cached_blocks() -> None:
    manager = manager_of(12)
    compute(manager, request_of("first", 12, salt="a"))
    assert manager.get_computed_blocks(request_of("second", 12, salt="b")).num_tokens == 0
    assert manager.get_computed_blocks(request_of("third", 12, salt="a")).num_tokens == 8


def test_no_block_is_found_before_it_is_computed() -> None:
    manager, first = manager_of(12), request_of("first", 12)
    manager.allocate_slots(first, 12)
    assert manager.get_computed_blocks(request_of("second", 12)).num_tokens == 0
    manager.cache_blocks(first, 7)
    assert manager.get_computed_blocks(request_of("second", 12)).num_tokens == 4
    manager.cache_blocks(first, 12)
    assert manager.get_computed_blocks(request_of("second", 12)).num_tokens == 8


def test_blocks_of_generated_tokens_are_found_too() -> None:
    manager, first = manager_of(12), request_of("first", 6)
    first.output_token_ids += [6, 7, 8]
    compute(manager, first)
    assert manager.get_computed_blocks(request_of("second", 12)).num_tokens == 8


def test_without_caching_nothing_is_found() -> None:
    manager = manager_of(12, caching=False)
    compute(manager, request_of("first", 12))
    assert manager.get_computed_blocks(request_of("second", 12)).num_tokens == 0
    manager.free("first")
    assert manager.pool.accounts().cached_idle == 0


def test_leased_blocks_stay_cached_and_are_not_allocated() -> None:
    manager = manager_of(5)
    compute(manager, request_of("first", 10))
    manager.lease("first")
    assert manager.pool.accounts() == BlockAccounts(4, 1, 0, 0, 3, 0)
    assert manager.block_ids("first") == []
    assert "first" in manager.held
    assert manager.allocate_slots(request_of("other", 8, first=50), 8).answer is LATER
    compute(manager, request_of("second", 10))
    assert manager.pool.accounts() == BlockAccounts(4, 0, 0, 3, 1, 0)
    assert manager.held.release("first")
    assert not manager.held.release("first")
    assert manager.pool.accounts() == BlockAccounts(4, 1, 0, 3, 0, 0)


def test_only_blocks_that_a_transfer_may_write_to_are_quarantined() -> None:
    """Two cached blocks, two that a transfer fills, and one lookahead block."""
    manager = manager_of(8)
    compute(manager, request_of("first", 9))
    manager.free("first")
    loading = request_of("loading", 16)
    computed = manager.get_computed_blocks(loading)
    answer = manager.allocate_slots(loading, 0, computed=computed, num_external_tokens=8, num_lookahead_tokens=1)
    assert answer.answer is OK
    filling = manager.block_ids("loading")[2:4]
    manager.quarantine("loading")
    assert manager.pool.accounts() == BlockAccounts(7, 3, 2, 0, 0, 2)
    others = manager.allocate_slots(request_of("other", 20, first=50), 20)
    assert others.answer is OK
    assert not set(others.new_block_ids) & set(filling)
    assert manager.held.release("loading")
    assert manager.pool.num_quarantined_blocks == 0


def test_a_request_without_blocks_has_nothing_to_lease_or_quarantine() -> None:
    manager = manager_of(4)
    manager.free("nobody")
    manager.lease("nobody")
    manager.quarantine("nobody")
    assert "nobody" not in manager.held
    assert not manager.held.release("nobody")


def test_the_invariant_check_names_the_holders_of_a_miscounted_block(block_accounts_agree: list[object]) -> None:
    manager = manager_of(4)
    manager.allocate_slots(request_of("holder", 4), 4)
    manager.pool.touch(manager.pool.blocks[1:2])
    manager.pool.check_invariant()
    with pytest.raises(BlockInvariantBroken, match=r"Block 1 owners=2.*tables 1.*holder"):
        manager.check_invariant()
    block_accounts_agree.clear()
