"""A model's tokens are the same with and without asynchronous scheduling, whatever happens to requests meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from baton.engine.core import EngineCore
from baton.engine.kv_cache.block_hash import CacheKeyFields
from baton.engine.request import Request
from baton.engine.runner import LazyExecutor, StepExecutor
from baton.engine.scheduler import Scheduler
from baton.engine.scheduler_config import PreemptionMode, SchedulerConfig
from baton.messages.node import Outcome
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams
from baton.runner.execution.step_thread import StepThread
from baton.runner.loading import load_runner
from baton.runner.model.random_model import write_random_model
from baton.runner.model_runner import TorchModelRunner
from baton.runner.spec import TorchSpec
from tests.doubles.fake_clock import FakeClock
from tests.support.engine_rig import name_of, prompt_of
from tests.support.executors import EagerExecutor
from tests.support.tiny_models import TINY_MODELS

NUM_REQUESTS = 8
EXECUTORS: list[Callable[[], StepExecutor | None]] = [lambda: None, LazyExecutor, EagerExecutor, StepThread]


class Sequence(NamedTuple):
    """How one request ended."""

    token_ids: list[int]
    reason: Outcome


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> TorchModelRunner:
    directory: Path = tmp_path_factory.mktemp("models") / "tiny"
    write_random_model(directory, TINY_MODELS["qwen3"], seed=1)
    return load_runner(TorchSpec(directory, dtype="float32", block_size=4, num_blocks=128, host_cache_bytes=1 << 20))


def requests(stops: dict[str, int]) -> list[Request]:
    """Greedy and seeded requests, some with logprobs, penalties and a common prefix; tokens in `stops` end some."""
    made = []
    for number in range(NUM_REQUESTS):
        name = f"r{number}"
        prompt = prompt_of(13, 7) + prompt_of(6 + 3 * number, number)
        params = SamplingParams(
            temperature=0.0 if number % 2 else 0.9,
            seed=number,
            presence_penalty=0.5 if number == 2 else 0.0,
            logprobs=3 if number == 3 else None,
            max_tokens=6 + 3 * number,
            stop_token_ids=frozenset({stops[name]}) if name in stops else frozenset(),
        )
        made.append(Request(name, RequestSpec([token % 256 for token in prompt], params)))
    return made


def generate(
    runner: TorchModelRunner,
    executor: StepExecutor | None,
    mode: PreemptionMode,
    num_blocks: int,
    stops: dict[str, int],
) -> tuple[dict[str, Sequence], int]:
    """Every request's output and the number of preemptions. r5 is aborted at its fourth token."""
    config = SchedulerConfig(
        num_blocks,
        block_size=4,
        max_num_batched_tokens=24,
        max_num_seqs=6,
        max_model_len=96,
        watermark=0.0,
        preemption_mode=mode,
        num_host_blocks=runner.num_host_blocks if mode == "swap" else 0,
    )
    scheduler = Scheduler(config, CacheKeyFields.of(runner.model, runner.layout), FakeClock())
    core = EngineCore(scheduler, runner, executor)
    tokens: dict[str, list[int]] = {}
    ends: dict[str, Sequence] = {}
    for request in requests(stops):
        core.scheduler.add_request(request)

    def note(by_client: object) -> None:
        assert isinstance(by_client, dict)
        for batch in by_client.values():
            for output in batch:
                own = tokens.setdefault(name_of(output), [])
                assert output.first_index == len(own)
                own += output.new_token_ids
                if output.outcome is not None:
                    ends[name_of(output)] = Sequence(own, output.outcome)

    while core.has_work():
        note(core.step())
        if len(tokens.get("r5", ())) == 4:
            note(core.scheduler.end_requests(["r5"], Outcome.ABORTED))
        scheduler.kv_cache_manager.check_invariant()
    core.close()
    # The next one begins with the same ids: let the runner forget them.
    runner.execute_model(scheduler.schedule())
    return ends, core.scheduler.make_stats().num_preemptions


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_outputs_do_not_depend_on_asynchronous_scheduling(runner: TorchModelRunner, mode: PreemptionMode) -> None:
    alone, none = generate(runner, None, "recompute", 128, {})
    assert not none
    stops = {name: alone[name].token_ids[4] for name in ("r2", "r3", "r6")}
    expected, _ = generate(runner, None, "recompute", 128, stops)
    assert {own.reason for own in expected.values()} == {Outcome.LENGTH, Outcome.STOP, Outcome.ABORTED}
    assert len({tuple(own.token_ids) for own in expected.values()}) == NUM_REQUESTS
    for make_executor in EXECUTORS:
        ended, num_preemptions = generate(runner, make_executor(), mode, 24, stops)
        assert ended == expected
        assert num_preemptions > 0
