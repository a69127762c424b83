"""A prompt of a model with windows needs only the blocks that its windows hold, and never waits in its middle."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from baton.engine.core import EngineCore
from baton.engine.kv_cache.block_hash import CacheKeyFields
from baton.engine.request import Request
from baton.engine.scheduler import Scheduler, SchedulerConfig
from baton.messages.node import Leg, Outcome
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams
from baton.runner.execution.step_thread import StepThread
from baton.runner.loading import load_runner
from baton.runner.model.random_model import write_random_model
from baton.runner.spec import TorchSpec
from tests.doubles.fake_clock import FakeClock
from tests.support.engine_rig import EngineRig
from tests.support.tiny_models import TINY_MODELS


def test_a_prompt_that_fits_with_its_window_is_computed() -> None:
    """60 stripes of two groups are 120 blocks; with a window of 160 keys the request holds at most 73 of 76 blocks."""
    rig = EngineRig(num_blocks=77, windows=(None, 160), block_size=16, max_num_batched_tokens=512)
    rig.complete("long", 960, max_tokens=4)
    assert rig.reason("long") is Outcome.LENGTH
    assert rig.tokens["long"] == rig.expected("long", 4)
    assert rig.scheduler.make_stats().free_blocks == 76


@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "ahead"])
@pytest.mark.parametrize("windows", [(10,), (None, 10), (6, None, 12)])
@pytest.mark.parametrize("leg", [Leg.WHOLE, Leg.PREFILL])
def test_a_growing_request_holds_no_more_blocks_than_were_allocated(
    windows: tuple[int | None, ...], leg: Leg, ahead: bool
) -> None:
    num_whole = windows.count(None)
    num_blocks = 1 + 50 * num_whole + 6 * (len(windows) - num_whole)
    executor = StepThread() if ahead else None
    rig = EngineRig(num_blocks=num_blocks, windows=windows, max_num_batched_tokens=40, executor=executor)
    rig.complete("long", 180, leg=leg, max_tokens=12)
    if leg is Leg.PREFILL:
        assert rig.reason("long") is Outcome.HANDED_OFF
        rig.check_offered("long", *rig.connector.leased["long"])
        rig.transfer(released=["long"])
    else:
        assert rig.tokens["long"] == rig.expected("long", 12)
    assert rig.scheduler.make_stats().free_blocks == num_blocks - 1
    rig.core.close()


def test_a_prompt_that_can_never_fit_with_its_windows_is_refused_at_once() -> None:
    rig = EngineRig(num_blocks=1 + 20, windows=(None, 10))
    rig.add("long", 90, max_tokens=4)
    assert rig.reason("long") is Outcome.IGNORED


def test_the_last_blocks_of_a_growing_request_are_found_by_the_next_request() -> None:
    rig = EngineRig(num_blocks=1 + 50 + 6, windows=(None, 10), max_num_batched_tokens=40)
    prompt = list(range(180))
    rig.complete("first", prompt, max_tokens=1)
    rig.complete("again", [*prompt, 7], max_tokens=2)
    assert rig.ends["again"].num_cached_tokens == 180
    assert rig.tokens["again"] == rig.expected("again", 2)


@pytest.mark.parametrize("seed", range(12))
def test_many_growing_requests_in_a_small_pool_all_end(seed: int) -> None:
    """Prompts of all lengths and both legs, with preemptions and aborts: none deadlocks, and no block is lost."""
    rng = Random(seed)
    windows: tuple[int | None, ...] = rng.choice([(10,), (None, 10), (6, None, 12)])
    num_blocks = 1 + 40 * max(1, windows.count(None)) + 7 * len(windows)
    rig = EngineRig(
        num_blocks=num_blocks,
        windows=windows,
        max_num_batched_tokens=rng.choice([8, 24, 64]),
        max_num_seqs=rng.choice([2, 5, 8]),
        preemption_mode=rng.choice(["recompute", "swap"]),
        num_host_blocks=200,
    )
    for number in range(24):
        leg = rng.choice([Leg.WHOLE, Leg.WHOLE, Leg.PREFILL])
        length = rng.choice([3, 20, 60, 120, 140])
        prompt = [(place * 3 + min(number, 3)) % 900 for place in range(length)]
        rig.add(f"r{number}", prompt, leg=leg, max_tokens=rng.randint(1, 16))
        for _ in range(rng.randint(0, 4)):
            if rig.core.has_work():
                rig.step()
        if rng.random() < 0.2:
            rig.abort(f"r{rng.randint(0, number)}")
        if rng.random() < 0.5:
            rig.transfer(released=list(rig.connector.leased))
            rig.connector.leased.clear()
    for _ in range(40):
        rig.run()
        rig.transfer(released=list(rig.connector.leased))
        rig.connector.leased.clear()
    assert not rig.scheduler.requests
    assert rig.scheduler.make_stats().free_blocks == num_blocks - 1
    for name, tokens in rig.tokens.items():
        assert tokens == rig.expected(name, len(tokens))


@pytest.mark.parametrize("architecture", ["mistral", "gemma2"])
def test_with_a_real_model_the_tokens_are_those_of_a_large_pool(tmp_path: Path, architecture: str) -> None:
    write_random_model(tmp_path, TINY_MODELS[architecture], 0)
    outputs = []
    for small in (False, True):
        layout = load_runner(TorchSpec(tmp_path, dtype="float32", block_size=4, num_blocks=64)).layout
        num_whole = layout.windows.count(None)
        num_stripes = 30 * num_whole + 9 * (len(layout.windows) - num_whole)
        num_blocks = 1 + (num_stripes if small else 100 * len(layout.windows))
        runner = load_runner(TorchSpec(tmp_path, dtype="float32", block_size=4, num_blocks=num_blocks))
        config = SchedulerConfig(
            num_blocks, 4, 32, 4, windows=layout.windows, keeps_states=layout.keeps_states, watermark=0.0
        )
        scheduler = Scheduler(config, CacheKeyFields.of(runner.model, runner.layout), FakeClock())
        core = EngineCore(scheduler, runner)
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        request = Request("r", RequestSpec([(13 * place) % 250 for place in range(100)], params))
        core.scheduler.add_request(request)
        while core.has_work():
            core.step()
            scheduler.kv_cache_manager.check_invariant()
        outputs.append(request.output_token_ids)
        assert len(request.output_token_ids) == 8
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("params", [{"n": 2}, {"beam_width": 2, "ignore_eos": False}])
def test_one_of_several_sequences_becomes_as_long_as_the_pool_whatever_windows_leave(params: dict[str, Any]) -> None:
    """The sequences share their prompt: until all of them run, none frees blocks that its windows have passed."""
    limits: dict[str, Any] = {"num_blocks": 9, "windows": (3, 3), "enable_prefix_caching": False}
    rig = EngineRig(**limits, max_num_batched_tokens=5, max_num_seqs=1 if "n" in params else 2)
    rig.complete("r", 1, **{"max_tokens": 17, "ignore_eos": True} | params)
    assert {end.outcome for end in rig.ends.values()} == {Outcome.LENGTH}
    assert (len(rig.tokens["r"]), rig.scheduler.max_model_len) == (16, 4096)
