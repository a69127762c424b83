"""Drives one engine step by step, as its node does: prompts of one length, then batches that only decode."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import TypeVar

from baton.bench.results.spread import Spread
from baton.clock import SystemClock
from baton.engine.batch import EngineCoreOutput
from baton.engine.core import EngineCore
from baton.engine.kv_cache.block_hash import CacheKeyFields
from baton.engine.request import Request
from baton.engine.runner import ModelRunner, StepExecutor
from baton.engine.scheduler import Scheduler
from baton.engine.scheduler_config import SchedulerConfig
from baton.errors import BatonError
from baton.messages.adapters import NO_ADAPTER
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams

R = TypeVar("R", bound=ModelRunner)


_FEW_BLOCKS = 64


def load_with_room(load: Callable[[int], R], num_stripes: Callable[[int], int]) -> R:
    """The runner that `load` makes of a number of blocks, with a block in each group of layers for so many stripes.

    `num_stripes` is told how many tokens a block has. How many groups a model has (layers with attention windows, or
    with states, are in groups of their own), and how large its blocks are, is known once it is loaded, so it is loaded
    twice.
    """
    runner = load(_FEW_BLOCKS)
    num_blocks = num_stripes(runner.layout.block_size) * len(runner.layout.groups)
    runner.close()
    del runner
    return load(num_blocks)


def engine_core(
    runner: ModelRunner,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    executor: StepExecutor | None = None,
    max_loras: int = 8,
) -> EngineCore:
    """An engine with its scheduler, as a node has one."""
    config = SchedulerConfig(
        num_blocks=runner.memory.num_blocks,
        block_size=runner.layout.block_size,
        windows=runner.layout.windows,
        keeps_states=runner.layout.keeps_states,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        max_model_len=runner.model.max_model_len,
        long_sequences=runner.model.long_sequences,
        max_loras=max_loras,
    )
    key_fields = CacheKeyFields.of(runner.model, runner.layout)
    return EngineCore(Scheduler(config, key_fields, SystemClock()), runner, executor)


def by_turns(
    first: Callable[[int], float], second: Callable[[int], float], rounds: int
) -> tuple[list[float], list[float]]:
    """The seconds that two ways take, measured in turns, so that drift of the machine's speed affects both.

    Their order alternates. Both are given the number of the turn; the turn with number 0 warms up and does not count.
    """
    seconds: tuple[list[float], list[float]] = [], []
    for turn in range(rounds + 1):
        sides = list(zip((first, second), seconds, strict=True))
        for way, taken in sides if turn % 2 else sides[::-1]:
            taken.append(way(turn))
    return seconds[0][1:], seconds[1][1:]


def rates_by_turns(num_tokens: int, first_s: Sequence[float], second_s: Sequence[float]) -> Sequence[float]:
    """Tokens a second of both ways, and how many times as fast the first one is: median, p10 and p90."""
    ratio = Spread.of([other / first for first, other in zip(first_s, second_s, strict=True)])
    return num_tokens / median(first_s), num_tokens / median(second_s), ratio.median, ratio.p10, ratio.p90


class EngineDrive:
    """Scheduler and runner, without threads, network or router. A prompt is computed in one step."""

    def __init__(
        self, runner: ModelRunner, prompt_tokens: int, max_batch: int, executor: StepExecutor | None = None
    ) -> None:
        """`executor`: see `EngineCore`; closed by `close`."""
        # At most the last block of a prompt is missing in the prefix cache.
        max_tokens = max(prompt_tokens, max_batch * runner.layout.block_size)
        self._core = engine_core(runner, max_tokens, max_batch, executor, max_loras=max_batch)
        self._count = 0

    def prefill(self, *prompts: Sequence[int], adapters: Sequence[str] = ()) -> float:
        """Computes prompts and their first tokens; returns the seconds of all. Their blocks stay in the prefix cache.

        A step computes one of them. `adapters`: the digest of each one's adapter; empty: none has any.
        """
        for prompt, adapter in zip(prompts, adapters or [NO_ADAPTER] * len(prompts), strict=True):
            self._add(prompt, 1, adapter)
        seconds = sum([self._step(1) for _ in prompts])
        self._finish_requests()
        return seconds

    def close(self) -> None:
        """Wait for the step in flight; nothing may be computed afterwards."""
        self._core.close()

    def decode(
        self,
        prompts: Sequence[Sequence[int]],
        steps: int,
        after_step: Callable[[], None] = lambda: None,
        adapters: Sequence[str] = (),
    ) -> list[float]:
        """Decodes requests with these prompts, which were computed before, as one batch; returns each step's seconds.

        `after_step` is called after each measured step. The first two steps are not measured: they compute the parts of
        the prompts that are not cached, and warm up. `adapters`: as in `prefill`.
        """
        for prompt, adapter in zip(prompts, adapters or [NO_ADAPTER] * len(prompts), strict=True):
            self._add(prompt, steps + 2, adapter)
        batch = len(prompts)
        self._step(batch)
        self._step(batch)
        seconds = []
        for _ in range(steps):
            seconds.append(self._step(batch))
            after_step()
        self._finish_requests()
        return seconds

    def _add(self, prompt: Sequence[int], max_tokens: int, adapter: str) -> None:
        self._count += 1
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self._core.scheduler.add_request(Request(f"bench-{self._count}", RequestSpec(prompt, params, adapter=adapter)))

    def _step(self, expected_tokens: int) -> float:
        started = time.perf_counter()
        results: list[EngineCoreOutput] = []
        while not results:
            # A step that is only decided, while others are computed, has no results.
            results = [output for client in self._core.step().values() for output in client]
        seconds = time.perf_counter() - started
        errors = [output.error for output in results if output.error]
        if errors:
            raise BatonError(f"the engine failed: {errors[0]}")
        if sum(len(output.new_token_ids) for output in results) != expected_tokens:
            raise BatonError("the requests did not run as one batch: the KV cache has too few blocks for all of them")
        return seconds

    def _finish_requests(self) -> None:
        """Runs steps until the runner has dropped all requests that ended."""
        while self._core.has_work():
            self._core.step()
