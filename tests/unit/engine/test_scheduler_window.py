"""Models whose layers have windows, all or some of them: blocks that no query sees any more are freed."""

from __future__ import annotations

import math
from pathlib import Path
from random import Random
from typing import Any

import pytest

from baton.engine.core import EngineCore
from baton.engine.kv_cache.block_hash import BlockHasher, CacheKeyFields, group_key
from baton.engine.kv_cache.block_pool import Block, BlockPool
from baton.engine.kv_cache.block_table import AllocationAnswer
from baton.engine.kv_cache.host_tier import HostTier
from baton.engine.kv_cache.manager import KVCacheManager
from baton.engine.request import Request
from baton.engine.scheduler import Scheduler, SchedulerConfig
from baton.errors import ConfigError
from baton.messages.kv_cache import BlockStored
from baton.messages.node import Leg, Outcome
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams
from baton.runner.loading import load_runner
from baton.runner.model.random_model import write_random_model
from baton.runner.spec import TorchSpec
from tests.doubles.fake_clock import FakeClock
from tests.support.engine_rig import EngineRig
from tests.support.tiny_models import TINY_MODELS


def held(rig: EngineRig) -> int:
    return rig.scheduler.kv_cache_manager.pool.accounts().owned


def test_a_long_sequence_holds_no_more_than_its_window() -> None:
    rig = EngineRig(windows=(10,))
    rig.add("long", 4, max_tokens=60)
    most = 0
    while "long" not in rig.ends:
        rig.step()
        most = max(most, held(rig))
    # The query at the next position sees 10 keys in at most 4 blocks of 4; one more block is allocated ahead.
    assert most <= 4
    assert rig.tokens["long"] == rig.expected("long", 60)


def test_blocks_are_freed_once_the_last_query_that_sees_them_is_computed() -> None:
    rig = EngineRig(windows=(5,))
    rig.begin("one", 8, max_tokens=8)
    # 8 tokens are computed; the next query, at 8, sees 4 to 8.
    assert rig.scheduler.kv_cache_manager.block_ids("one")[:1] == [0]
    assert held(rig) == 1
    rig.run_right("one")


def test_blocks_of_prompts_are_freed_chunk_by_chunk_and_stay_cached() -> None:
    rig = EngineRig(windows=(5,), max_num_batched_tokens=8)
    prompt = list(range(100, 132))
    rig.begin("first", prompt, max_tokens=1)
    assert held(rig) == 32 // 4 - 1, "one block of the first chunk is out of sight of the next"
    rig.run()
    rig.complete("again", prompt, max_tokens=1)
    assert rig.requests["again"].num_cached_tokens == 28
    assert rig.tokens["again"] == rig.expected("again", 1)


def test_only_groups_with_a_window_free_blocks() -> None:
    rig = EngineRig(windows=(None, 10))
    rig.add("long", 4, max_tokens=60)
    most = 0
    while "long" not in rig.ends:
        rig.step()
        tokens = rig.requests["long"].num_tokens
        most = max(most, held(rig) - -(-tokens // 4))
    assert most <= 4
    assert rig.tokens["long"] == rig.expected("long", 60)


def test_blocks_freed_by_one_group_can_be_allocated_to_another_request() -> None:
    # 12 stripes of two groups hold two sequences of 24 tokens; of 40 tokens only if windows free blocks.
    rig = EngineRig(num_blocks=2 * 12 + 1, windows=(None, 4), max_num_seqs=2)
    for name in ("one", "other"):
        rig.add(name, 4, max_tokens=36)
    rig.run()
    assert not rig.scheduler.make_stats().num_preemptions
    for name in ("one", "other"):
        assert rig.tokens[name] == rig.expected(name, 36)


@pytest.mark.parametrize("length", range(9, 17))
def test_a_prefill_leg_keeps_the_blocks_that_it_offers(length: int) -> None:
    rig = EngineRig(windows=(None, 4))
    rig.complete("offered", length, leg=Leg.PREFILL, max_tokens=4)
    rig.check_offered("offered", *rig.connector.leased["offered"])


@pytest.mark.parametrize("windows", [(4,), (None, 4)], ids=["alone", "mixed"])
def test_a_prefill_leg_offers_the_blocks_that_a_continuation_sees(windows: tuple[int | None, ...]) -> None:
    rig = EngineRig(windows=windows, max_num_batched_tokens=8)
    rig.begin("offered", 16, leg=Leg.PREFILL, max_tokens=4)
    rig.check_offered("offered", *rig.connector.offers["offered"])
    assert held(rig) == 4 * len(windows) - 1, "the first stripe is out of the window's sight"
    rig.run()
    assert rig.requests["offered"].outcome is Outcome.HANDED_OFF
    rig.check_offered("offered", *rig.connector.leased["offered"])
    # The query at 15 sees 12 to 15, should the last token be computed again.
    leased = rig.scheduler.make_stats().leased_blocks
    assert leased == (1 if len(windows) == 1 else 4 + 1)
    rig.transfer(released=["offered"])
    assert rig.scheduler.make_stats().leased_blocks == 0


@pytest.mark.parametrize(("windows", "reserved"), [((6,), 2 + 1), ((None, 6), 5 + 1 + 2 + 1)], ids=["alone", "mixed"])
def test_a_decode_leg_loads_only_the_blocks_that_it_sees(windows: tuple[int | None, ...], reserved: int) -> None:
    rig = EngineRig(windows=windows)
    rig.begin("taken", 20, leg=Leg.DECODE, max_tokens=12)
    load = rig.connector.loads["taken"]
    # The query at 19 sees 14 to 19, in stripes 3 and 4.
    of_window = load.block_ids[len(windows) - 1 :: len(windows)]
    assert [block != 0 for block in of_window] == [False, False, False, True, True]
    assert held(rig) == reserved, "and the slot of the first generated token"
    rig.complete_transfer("taken")
    rig.run_right("taken")


def test_an_aborted_load_quarantines_the_blocks_that_it_was_to_fill() -> None:
    rig = EngineRig(windows=(None, 6))
    rig.begin("taken", 20, leg=Leg.DECODE, max_tokens=12)
    rig.abort("taken")
    assert rig.scheduler.make_stats().quarantined_blocks == 5 + 2
    rig.transfer(released=["taken"])
    assert rig.scheduler.make_stats().free_blocks == 64


def windowed_manager(*, num_host_blocks: int = 0) -> KVCacheManager:
    """A manager with blocks of 4 tokens for a model with one group of layers, whose window is 6 keys."""
    hasher = BlockHasher(CacheKeyFields("m", "d", "l"), 4)
    host = HostTier(num_host_blocks) if num_host_blocks else None
    return KVCacheManager(BlockPool(40), hasher, 4, windows=(6,), enable_caching=True, host=host)


def taken_in(manager: KVCacheManager, num_tokens: int, partly_filled: list[int]) -> Request:
    """A request whose prompt was read from another node, with these entries filled only in part."""
    request = Request("taken", RequestSpec(range(100, 100 + num_tokens), SamplingParams(max_tokens=8)))
    allocation = manager.allocate_slots(request, 0, num_external_tokens=num_tokens)
    assert allocation.answer is AllocationAnswer.OK
    manager.note_partly_filled(request, partly_filled)
    request.num_computed_tokens = num_tokens
    manager.cache_blocks(request, num_tokens)
    return request


def cached_stripes(manager: KVCacheManager, request: Request) -> list[int]:
    keys = enumerate(request.block_hashes)
    return [stripe for stripe, key in keys if manager.pool.get_cached_block(key) is not None]


def test_a_block_that_was_filled_in_part_is_found_by_nobody() -> None:
    manager = windowed_manager()
    # The query at 19 sees 14 to 19, in stripes 3 and 4.
    request = taken_in(manager, 20, [3])
    assert cached_stripes(manager, request) == [4]
    manager.free("taken")
    assert manager.get_computed_blocks(request).num_tokens == 0, "the query at 16 sees 11 to 16"
    # The block is whole for its next owner.
    other = Request("other", RequestSpec(range(500, 500 + 36 * 4), SamplingParams(max_tokens=8)))
    manager.allocate_slots(other, 36 * 4)
    manager.cache_blocks(other, 36 * 4)
    assert cached_stripes(manager, other) == list(range(36))


def test_a_last_block_that_was_filled_in_part_is_not_cached_once_it_is_full() -> None:
    manager = windowed_manager()
    request = taken_in(manager, 19, [4])
    request.output_token_ids.extend([1, 2, 3, 4, 5])
    manager.allocate_slots(request, 5)
    manager.cache_blocks(request, 24)
    assert cached_stripes(manager, request) == [3, 5]


def test_a_request_with_a_block_that_was_filled_in_part_is_not_swapped() -> None:
    manager = windowed_manager(num_host_blocks=20)
    request = taken_in(manager, 20, [3])
    assert not manager.swap_out(request)
    manager.drop_unseen("taken", 24)
    assert manager.swap_out(request), "the window has passed the block"


def test_a_block_that_was_filled_in_part_is_shared_with_later_queries_only_and_its_copies_are_not_cached() -> None:
    manager = windowed_manager()
    request = taken_in(manager, 19, [3, 4])
    assert manager.shared_prefix(request, 17) is None, "the query at 17 sees 12 to 17"
    shared = manager.shared_prefix(request, 18)
    assert shared is not None
    sibling = Request("sibling", RequestSpec(request.prompt_token_ids, SamplingParams(max_tokens=8)))
    sibling.output_token_ids.append(7)
    assert len(manager.allocate_slots(sibling, 2, computed=shared).copies) == 1
    manager.cache_blocks(sibling, 20)
    assert cached_stripes(manager, sibling) == []


@pytest.mark.parametrize("valid", [4, 5])
def test_of_a_failed_load_no_block_that_was_filled_in_part_is_found(valid: int) -> None:
    manager = windowed_manager()
    request = Request("taken", RequestSpec(range(100, 120), SamplingParams(max_tokens=8)))
    manager.allocate_slots(request, 0, num_external_tokens=20)
    manager.note_partly_filled(request, [3])
    manager.cache_valid(request, valid)
    assert cached_stripes(manager, request) == list(range(4, valid))


def forget(pool: BlockPool, block: Block) -> None:
    """Evict one idle cached block, as an allocation would."""
    key = block.block_hash
    assert key is not None
    pool._free.remove(block)
    pool._free.prepend(block)
    pool.free_blocks(pool.get_new_blocks(1))
    assert pool.get_cached_block(key) is None


def test_a_prefix_is_found_by_what_its_next_query_sees() -> None:
    rig = EngineRig(windows=(None, 5))
    prompt = list(range(100, 132))
    rig.complete("first", prompt, max_tokens=4)
    pool = rig.scheduler.kv_cache_manager.pool
    for key in rig.requests["first"].block_hashes[:6]:
        block = pool.get_cached_block(group_key(key, 1))
        assert block is not None
        forget(pool, block)
    rig.complete("again", prompt, max_tokens=4)
    assert rig.requests["again"].num_cached_tokens == 28
    assert rig.tokens["again"] == rig.expected("again", 4)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("windows", [(7,), (None, 7), (None, 5, 12), (12, 5)])
def test_a_prefix_that_lacks_what_its_next_query_sees_is_shorter(windows: tuple[int | None, ...], seed: int) -> None:
    pool = BlockPool(100)
    manager = KVCacheManager(
        pool, BlockHasher(CacheKeyFields("m", "d", "l"), 4), 4, windows=windows, enable_caching=True
    )
    request = Request("r", RequestSpec(list(range(41)), SamplingParams()))
    manager.allocate_slots(request, 41)
    manager.cache_blocks(request, 41)
    manager.free("r")
    rng = Random(seed)
    groups = len(windows)
    entries = [
        pool.get_cached_block(group_key(request.block_hashes[i // groups], i % groups)) for i in range(10 * groups)
    ]
    while True:
        here = [block is not None and block.block_hash is not None for block in entries]
        found = manager.get_computed_blocks(request)
        # By trying all lengths, longest first.
        expected = next(
            stripes
            for stripes in range(10, -1, -1)
            if all(
                here[stripe * groups + group]
                for group, window in enumerate(windows)
                for stripe in range(0 if window is None else max(0, stripes * 4 - window + 1) // 4, stripes)
            )
        )
        assert found.num_tokens == expected * 4
        for entry, block in enumerate(found.blocks):
            window = windows[entry % groups]
            seen = window is None or entry // groups * 4 + 3 >= expected * 4 - window + 1
            assert block is (entries[entry] if seen else pool.null_block)
        left = [block for block in entries if block is not None and block.block_hash is not None]
        if not left:
            return
        forget(pool, rng.choice(left))


def test_the_events_name_the_group() -> None:
    rig = EngineRig(windows=(None, 4))
    rig.scheduler.kv_snapshot()
    rig.complete("r", 8, max_tokens=1)
    first, second = rig.requests["r"].block_hashes
    stored = [
        event for event in rig.scheduler.kv_cache_manager.kv_events.since(0).events if isinstance(event, BlockStored)
    ]
    assert [(event.group, list(event.block_hashes)) for event in stored] == [
        (0, [first, second]),
        (1, [first + b"\1", second + b"\1"]),
    ]


@pytest.mark.parametrize("windows", [(12,), (None, 5), (6, None, 12)])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted_requests_with_windows_are_resumed_completely(mode: str, windows: tuple[int | None, ...]) -> None:
    host_blocks = 60 if mode == "swap" else 0
    rig = EngineRig(num_blocks=8 * len(windows) + 1, windows=windows, preemption_mode=mode, num_host_blocks=host_blocks)
    names = ("old", "middle", "new")
    for place, name in enumerate(names):
        rig.add(name, 8 - place, max_tokens=20)
    rig.run()
    assert rig.scheduler.make_stats().num_preemptions_by_mode[mode]
    assert all(rig.tokens[name] == rig.expected(name, 20) for name in names)


def test_a_prompt_that_fits_only_without_its_cache_hits_is_computed_without_them() -> None:
    rig = EngineRig(num_blocks=6, windows=(6,), max_num_batched_tokens=5, max_num_seqs=1)
    prompt = list(range(100, 121))
    rig.complete("first", prompt[:5], max_tokens=1)
    # Chunks of 5 tokens need all five blocks at a time, and the block found in the cache would be a sixth.
    rig.complete("long", prompt, max_tokens=3)
    assert rig.requests["long"].num_cached_tokens == 0
    assert rig.tokens["long"] == rig.expected("long", 3)


@pytest.mark.parametrize("window", [0, -3])
def test_a_window_is_at_least_the_query_itself(window: int) -> None:
    with pytest.raises(ConfigError, match="windows must be at least 1 key"):
        EngineRig(windows=(window,))


MIXED = ["gemma2", "gemma3_text", "gpt_oss"]


@pytest.mark.parametrize(
    ("architecture", "groups"),
    [("mistral", ["16@0,1,2"]), ("llama", ["all@0,1,2"])] + [(name, ["all@1", "16@0", "16@2"]) for name in MIXED],
)
def test_groups_of_layers_follow_from_a_models_windows(tmp_path: Path, architecture: str, groups: list[str]) -> None:
    write_random_model(tmp_path, TINY_MODELS[architecture], 0)
    runner = load_runner(TorchSpec(tmp_path, dtype="float32", num_blocks=16))
    assert [str(group) for group in runner.layout.groups] == groups


@pytest.mark.parametrize("architecture", ["gemma3_text", "gpt_oss"])
def test_with_a_real_model_freeing_blocks_changes_no_token(tmp_path: Path, architecture: str) -> None:
    write_random_model(tmp_path, TINY_MODELS[architecture], 0)
    layout = load_runner(TorchSpec(tmp_path, dtype="float32", block_size=4, num_blocks=64)).layout
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    outputs = []
    # The second pool is too small for three whole sequences, so freed blocks are allocated again.
    for windows, num_stripes in (((None,) * len(layout.windows), 60), (layout.windows, 34)):
        num_blocks = 1 + num_stripes * len(windows)
        runner = load_runner(TorchSpec(tmp_path, dtype="float32", block_size=4, num_blocks=num_blocks))
        config = SchedulerConfig(num_blocks, block_size=4, max_num_batched_tokens=32, max_num_seqs=4, windows=windows)
        scheduler = Scheduler(config, CacheKeyFields.of(runner.model, runner.layout), FakeClock())
        core = EngineCore(scheduler, runner)
        requests = [
            Request(f"r{i}", RequestSpec([(13 * i + j) % 250 for j in range(20 + i)], params)) for i in range(3)
        ]
        for request in requests:
            scheduler.add_request(request)
        while core.has_work():
            core.step()
            scheduler.kv_cache_manager.check_invariant()
            # A freed block keeps its KV until another sequence has it, which may be long after it was freed too early.
            free = [block.block_id for block in scheduler.kv_cache_manager.pool.blocks[1:] if not block.ref_cnt]
            runner._transformer.kv_cache.view(num_blocks, -1)[free] = math.nan
        assert not scheduler.make_stats().num_preemptions
        assert all(request.outcome is Outcome.LENGTH for request in requests)
        outputs.append([request.output_token_ids for request in requests])
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("many", [{"n": 3, "seed": 5}, {"n": 3, "beam_width": 3}], ids=["siblings", "beams"])
def test_sequences_keep_their_shared_prompt_until_all_run(many: dict[str, Any]) -> None:
    tokens = []
    for window in (None, 5):
        rig = EngineRig(windows=(window,))
        rig.complete("r", list(range(200, 214)), max_tokens=12, **many)
        tokens.append(rig.tokens)
    assert tokens[0] == tokens[1]
    assert {name: len(own) for name, own in tokens[1].items()} == {"r": 12, "r~1": 12, "r~2": 12}


@pytest.mark.parametrize("many", [{"n": 3, "seed": 5}, {"n": 3, "beam_width": 3}], ids=["siblings", "beams"])
def test_sequences_free_their_shared_prompt_once_all_run(many: dict[str, Any]) -> None:
    rig = EngineRig(windows=(5,))
    rig.add("r", 40, max_tokens=30, **many)
    rig.steps(20)
    # Each of three sees 5 keys in at most 3 blocks, and a beam's successors keep what it had for a step.
    assert held(rig) <= 2 * 3 * 3
    rig.run()
    assert {len(own) for own in rig.tokens.values()} == {30}


def test_a_waiting_sequence_does_not_recompute_the_prompt() -> None:
    rig = EngineRig(windows=(None, 5), max_num_seqs=2, enable_prefix_caching=False)
    rig.complete("r", 40, max_tokens=12, n=3, seed=5)
    assert {name: len(own) for name, own in rig.tokens.items()} == {"r": 12, "r~1": 12, "r~2": 12}
    assert all(rig.tokens[name] == rig.expected(name, 12) for name in rig.tokens)
    begun_at = [value for kind, _, value in rig.events() if kind == "scheduled"]
    assert begun_at == [0, 39, 39], "the prompt is computed once, and its last token for each"


def test_a_swapped_table_returns_with_the_same_null_blocks() -> None:
    pool, host = BlockPool(40), HostTier(40)
    hasher = BlockHasher(CacheKeyFields("m", "d", "l"), 4)
    manager = KVCacheManager(pool, hasher, 4, windows=(None, 5), enable_caching=True, host=host)
    request = Request("r", RequestSpec(list(range(21)), SamplingParams()))
    manager.allocate_slots(request, 21)
    request.num_computed_tokens = 21
    manager.cache_blocks(request, 21)
    manager.drop_unseen("r", 21)
    holes = [block_id == 0 for block_id in manager.block_ids("r")]
    assert sum(holes) == 4, "the query at 21 sees 17 to 21"
    assert manager.swap_out(request)
    assert host.num_blocks("r") == 12 - 4
    assert manager.swap_in(request) is AllocationAnswer.OK
    assert [block_id == 0 for block_id in manager.block_ids("r")] == holes
    manager.check_invariant()


def test_a_prefix_that_lacks_blocks_is_not_shared() -> None:
    rig = EngineRig(windows=(None, 4))
    rig.begin("r", 12, max_tokens=4)
    manager, request = rig.scheduler.kv_cache_manager, rig.scheduler.requests["r"]
    assert manager.block_ids("r")[1::2][:2] == [0, 0], "the next query, at 12, sees 9 to 12"
    assert manager.shared_prefix(request, 8) is None
    shared = manager.shared_prefix(request, 12)
    assert shared is not None
    assert [block.block_id for block in shared.blocks] == manager.block_ids("r")[:6]


def test_a_scheduler_for_other_groups_than_the_models_is_refused() -> None:
    rig = EngineRig(windows=(None, 4))
    one_group = Scheduler(SchedulerConfig(65, block_size=4), CacheKeyFields("m", "d", "l"), FakeClock())
    with pytest.raises(ConfigError, match="windows of 1 groups of layers, the model has 2"):
        EngineCore(one_group, rig.runner)
