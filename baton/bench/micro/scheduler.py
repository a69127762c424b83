"""`baton bench scheduler`: measures the time to schedule and commit steps, without model, processes or threads.

In a steady step every running request decodes; none is admitted or ends, and each gets a new block every `block_size`
steps. Figures are the time of `schedule` plus `update_from_output`; the stand-in for the runner is not counted.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from statistics import median

from baton.bench.config import SchedulerBenchConfig
from baton.clock import SystemClock
from baton.engine.batch import ModelRunnerOutput, SchedulerOutput
from baton.engine.kv_cache.block_hash import BlockHasher, CacheKeyFields
from baton.engine.request import Request
from baton.engine.scheduler import Scheduler, SchedulerConfig
from baton.errors import BatonError
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams

RUNNING = (16, 128, 512, 1024)
_BLOCK_SIZE = 16
_PERIODS = 2
"""A round has this many times `block_size` steps, so each request gets this many blocks in it."""
_FIELDS = CacheKeyFields("bench", "bfloat16", "bench")
_VOCAB = 30_000


@dataclass(frozen=True, slots=True)
class SchedulerReport:
    """Microseconds; medians over rounds of 32 steps, or over single requests."""

    steady_us: dict[str, float]
    """Time of a steady step, by number of running requests."""
    steady_us_with_10000_waiting: float
    steady_us_without_waiting: float
    """Time of the same step without waiting requests, measured in turn with it."""
    admit_us: float
    """Time that a step takes longer if it admits a prompt of which half is cached."""
    hash_us: float
    """Time to hash the blocks of one prompt."""
    preempt_us: float
    """Time that a step takes longer if it preempts one request."""


def run(config: SchedulerBenchConfig, running: Sequence[int] = RUNNING) -> SchedulerReport:
    """Runs the benchmark, which takes a few seconds."""
    gc.collect()
    gc.disable()
    try:
        steady = {str(n): _steady([_Bench(n, config.prompt_tokens)], config.rounds)[0] for n in running}
        quiet = _Bench(config.waiting_running, config.prompt_tokens)
        crowded = _Bench(config.waiting_running, config.prompt_tokens)
        crowded.add_waiting(config.waiting)
        without, with_waiting = _steady([quiet, crowded], config.rounds)
        return SchedulerReport(
            steady_us=steady,
            steady_us_with_10000_waiting=with_waiting,
            steady_us_without_waiting=without,
            admit_us=_admission(config),
            hash_us=_hashing(config),
            preempt_us=_preemption(config),
        )
    finally:
        gc.enable()


class _Bench:
    """A scheduler with a number of decoding requests, and blocks for many more steps."""

    def __init__(self, running: int, prompt_tokens: int, *, seats: int = 0, num_blocks: int = 0) -> None:
        self._rng = Random(running)
        self._count = 0
        self.prompt_tokens = prompt_tokens
        blocks = num_blocks or (running + seats) * (prompt_tokens // _BLOCK_SIZE + 64) + 1
        self.scheduler = Scheduler(
            SchedulerConfig(
                num_blocks=blocks,
                block_size=_BLOCK_SIZE,
                max_num_batched_tokens=max(8192, running + seats + prompt_tokens),
                max_num_seqs=running + seats,
                max_model_len=prompt_tokens + 64 * _BLOCK_SIZE,
                watermark=0.0,
            ),
            _FIELDS,
            SystemClock(),
        )
        for _ in range(running):
            self.add(self.prompt())
        while len(self.scheduler.decoding) < running:
            self.step()

    def prompt(self) -> list[int]:
        return [self._rng.randrange(_VOCAB) for _ in range(self.prompt_tokens)]

    def add(self, prompt: Sequence[int], max_tokens: int = 100_000) -> Request:
        self._count += 1
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = Request(f"request-{self._count}", RequestSpec(prompt, params))
        self.scheduler.add_request(request)
        return request

    def add_waiting(self, number: int) -> None:
        for _ in range(number):
            self.add([1, 2, 3])

    def step(self) -> float:
        """Executes one step; returns its seconds without the stand-in for the runner."""
        started = time.perf_counter()
        decided = self.scheduler.schedule()
        scheduled = time.perf_counter()
        computed = self._compute(decided)
        update_from = time.perf_counter()
        self.scheduler.update_from_output(decided, computed)
        ended = time.perf_counter()
        self.scheduler.take_events()
        return scheduled - started + ended - update_from

    def _compute(self, decided: SchedulerOutput) -> ModelRunnerOutput:
        requests = self.scheduler.requests
        drawn = {request_id: [7] for request_id in decided.num_scheduled_tokens}
        for request_id, count in decided.num_scheduled_tokens.items():
            # A chunk that does not reach the end of its prompt draws no token.
            if count > 1 and requests[request_id].num_computed_tokens < requests[request_id].num_tokens:
                del drawn[request_id]
        return ModelRunnerOutput(drawn)


def _steady(benches: Sequence[_Bench], rounds: int) -> list[float]:
    """Microseconds of a steady step of each bench, measured in turn; the first round warms up."""
    steps = _PERIODS * _BLOCK_SIZE
    took: list[list[float]] = [[] for _ in benches]
    for _ in range(rounds + 1):
        for bench, own in zip(benches, took, strict=True):
            own.append(sum(bench.step() for _ in range(steps)) / steps * 1e6)
    return [median(own[1:]) for own in took]


def _admission(config: SchedulerBenchConfig) -> float:
    bench = _Bench(16, config.prompt_tokens, seats=1)
    half = config.prompt_tokens // 2
    took = []
    for _ in range(config.admissions):
        prompt = bench.prompt()
        _cache_prompt(bench, prompt)
        without = bench.step()
        request = bench.add(prompt[:half] + bench.prompt()[half:], max_tokens=2)
        took.append((bench.step() - without) * 1e6)
        if request.num_cached_tokens != half:
            raise BatonError(
                f"the benchmark needs {half} cached tokens, but the prefix cache had {request.num_cached_tokens}; "
                "--prompt-tokens must be a multiple of 32"
            )
        bench.step()
    return median(took)


def _cache_prompt(bench: _Bench, prompt: Sequence[int]) -> None:
    """Runs a request of one token, which leaves its prompt in the prefix cache."""
    request = bench.add(prompt, max_tokens=1)
    while request.request_id in bench.scheduler.requests:
        bench.step()


def _hashing(config: SchedulerBenchConfig) -> float:
    hasher = BlockHasher(_FIELDS, _BLOCK_SIZE)
    rng = Random(0)

    def one() -> Callable[[], None]:
        tokens = [rng.randrange(_VOCAB) for _ in range(config.prompt_tokens)]
        request = Request("request", RequestSpec(tokens, SamplingParams()))
        return lambda: hasher.extend_request(request, config.prompt_tokens)

    took = []
    for _ in range(config.admissions):
        hash_it = one()
        started = time.perf_counter()
        hash_it()
        took.append((time.perf_counter() - started) * 1e6)
    return median(took)


def _preemption(config: SchedulerBenchConfig) -> float:
    """Two requests grow until the pool is full and the newer one is preempted."""
    took = []
    for _ in range(config.admissions):
        blocks = 2 * (config.prompt_tokens // _BLOCK_SIZE + 2) + 1
        bench = _Bench(2, config.prompt_tokens, num_blocks=blocks)
        before = bench.step()
        while bench.scheduler.get_request_counts()[0] == 2:
            seconds, last = bench.step(), before
            before = seconds
        took.append((before - last) * 1e6)
    return median(took)
