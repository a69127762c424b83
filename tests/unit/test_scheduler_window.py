"""Sequences of a model whose layers all have a window: what no query sees any more is let go of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton.clock import ManualClock
from baton.engine.block_hash import CacheKeyFields
from baton.engine.core import EngineCore
from baton.engine.request import Leg, Request, RequestStatus, SamplingParams
from baton.engine.runner.model_runner import load_runner
from baton.engine.runner.random_model import write_random_model
from baton.engine.scheduler import Scheduler, SchedulerConfig
from baton.errors import ConfigError
from tests.support.engine_rig import EngineRig
from tests.support.tiny_models import TINY_MODELS


def held(rig: EngineRig) -> int:
    return rig.scheduler.kv_cache_manager.pool.accounts().owned


def test_a_long_sequence_holds_no_more_than_its_window() -> None:
    rig = EngineRig(sliding_window=10)
    rig.add("long", 4, max_tokens=60)
    most = 0
    while "long" not in rig.ends:
        rig.step()
        most = max(most, held(rig))
    # The query at the next position sees 10 keys, which lie in at most 4 blocks of 4; one more is taken in time.
    assert most <= 4
    assert rig.tokens["long"] == rig.expected("long", 60)


def test_blocks_go_once_the_last_query_that_sees_them_is_computed() -> None:
    rig = EngineRig(sliding_window=5)
    rig.add("one", 8, max_tokens=8)
    rig.step()
    # 8 tokens are computed; the next query, at 8, sees 4 to 8.
    assert rig.scheduler.kv_cache_manager.block_ids("one")[:1] == [0]
    assert held(rig) == 1
    rig.run()
    assert rig.tokens["one"] == rig.expected("one", 8)


def test_prompts_are_dropped_chunk_by_chunk_and_stay_in_the_cache() -> None:
    rig = EngineRig(sliding_window=5, max_num_batched_tokens=8)
    prompt = list(range(100, 132))
    rig.add("first", prompt, max_tokens=1)
    rig.step()
    assert held(rig) == 32 // 4 - 1, "one block of the first chunk is out of sight of the next"
    rig.run()
    rig.add("again", prompt, max_tokens=1)
    rig.run()
    assert rig.requests["again"].num_cached_tokens == 28


def test_a_prefill_leg_keeps_what_it_offers() -> None:
    rig = EngineRig(sliding_window=4)
    rig.add("offered", 16, leg=Leg.PREFILL, max_tokens=4)
    rig.run()
    assert rig.requests["offered"].status is RequestStatus.HANDED_OFF
    block_ids, num_tokens = rig.connector.leased["offered"]
    assert (len(block_ids), num_tokens) == (4, 16)
    assert 0 not in block_ids


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted_ones_come_back_whole(mode: str) -> None:
    host_blocks = 20 if mode == "swap" else 0
    rig = EngineRig(num_blocks=9, sliding_window=12, preemption_mode=mode, num_host_blocks=host_blocks)
    names = ("old", "middle", "new")
    for place, name in enumerate(names):
        rig.add(name, 8 - place, max_tokens=20)
    rig.run()
    assert rig.core.make_stats().num_preemptions
    assert all(rig.tokens[name] == rig.expected(name, 20) for name in names)


@pytest.mark.parametrize("window", [0, -3])
def test_a_window_is_at_least_the_query_itself(window: int) -> None:
    with pytest.raises(ConfigError, match="sliding_window"):
        EngineRig(sliding_window=window)


@pytest.mark.parametrize(("architecture", "window"), [("mistral", 16), ("gemma2", None), ("llama", None)])
def test_a_model_says_how_far_it_sees(tmp_path: Path, architecture: str, window: int | None) -> None:
    write_random_model(tmp_path, TINY_MODELS[architecture], 0)
    assert load_runner(tmp_path, dtype="float32", num_blocks=16).model.attention_window == window


def test_with_a_real_model_the_tokens_are_those_without_dropping(tmp_path: Path) -> None:
    write_random_model(tmp_path, TINY_MODELS["mistral"], 0)
    outputs = []
    # With a window the pool is too small for three whole sequences: what was let go of is overwritten.
    for window, num_blocks in ((None, 60), (16, 24)):
        runner = load_runner(tmp_path, dtype="float32", block_size=4, num_blocks=num_blocks)
        config = SchedulerConfig(
            num_blocks, block_size=4, max_num_batched_tokens=32, max_num_seqs=4, sliding_window=window
        )
        scheduler = Scheduler(config, CacheKeyFields.of(runner.model, runner.layout), ManualClock())
        core = EngineCore(scheduler, runner)
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        requests = [Request(f"r{i}", [(13 * i + j) % 250 for j in range(20 + i)], params) for i in range(3)]
        for request in requests:
            core.add_request(request)
        while core.has_work():
            core.step()
            scheduler.check_invariant()
        assert not scheduler.make_stats().num_preemptions
        outputs.append([request.output_token_ids for request in requests])
        assert all(request.status is RequestStatus.LENGTH_CAPPED for request in requests)
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("many", [{"n": 3, "seed": 5}, {"n": 3, "beam_width": 3}], ids=["siblings", "beams"])
def test_sequences_that_share_a_prompt_keep_it(many: dict[str, Any]) -> None:
    tokens = []
    for window in (None, 5):
        rig = EngineRig(sliding_window=window)
        rig.add("r", list(range(200, 214)), max_tokens=12, **many)
        rig.run()
        tokens.append(rig.tokens)
    assert tokens[0] == tokens[1]
    assert {name: len(own) for name, own in tokens[1].items()} == {"r": 12, "r~1": 12, "r~2": 12}


def test_a_prefix_with_holes_is_not_shared() -> None:
    rig = EngineRig(sliding_window=4)
    rig.add("r", 12, max_tokens=4)
    rig.step()
    with pytest.raises(ValueError, match="r has dropped blocks of its prefix"):
        rig.scheduler.kv_cache_manager.shared_prefix("r", 8)
