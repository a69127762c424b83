"""Runs requests on a single engine in this process, as a baseline for a cluster."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from baton.clock import SystemClock
from baton.engine.core import EngineCore
from baton.engine.kv_cache.block_hash import CacheKeyFields
from baton.engine.request import Request
from baton.engine.runner import KVLayout
from baton.engine.scheduler import Scheduler
from baton.engine.scheduler_config import SchedulerConfig
from baton.messages.sampling import SamplingParams
from baton.models.resolve import FoundModel
from baton.runner import TorchSpec, load


@dataclass(frozen=True, slots=True)
class SoloRun:
    """The result of one request on one engine."""

    ttft_ms: float
    token_ids: Sequence[int]


class SoloEngine:
    """One engine with the same limits as a node's, without threads, network or router."""

    def __init__(
        self, model: FoundModel, dtype: str, cache_bytes: int, max_num_batched_tokens: int, num_threads: int
    ) -> None:
        self.runner = load(
            TorchSpec(
                model.directory,
                dtype,
                cache_bytes=cache_bytes,
                num_threads=num_threads,
                dequantize=model.dequantize,
            )
        )
        limits = SchedulerConfig(
            num_blocks=self.runner.memory.num_blocks,
            windows=self.runner.layout.windows,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=min(64, max_num_batched_tokens),
            max_model_len=self.runner.model.max_model_len,
            long_sequences=self.runner.model.long_sequences,
        )
        key_fields = CacheKeyFields.of(self.runner.model, self.runner.layout)
        self._core = EngineCore(Scheduler(limits, key_fields, SystemClock()), self.runner)
        self._count = 0

    @property
    def layout(self) -> KVLayout:
        return self.runner.layout

    def run(self, prompt: Sequence[int], params: SamplingParams) -> SoloRun:
        """Runs one request to its end."""
        self._count += 1
        tokens: list[int] = []
        first_ms, started = 0.0, time.perf_counter()
        self._core.scheduler.add_request(Request(f"solo-{self._count}", prompt, params))
        while self._core.has_work():
            for outputs in self._core.step().values():
                for output in outputs:
                    tokens += output.new_token_ids
            if tokens and not first_ms:
                first_ms = (time.perf_counter() - started) * 1e3
        return SoloRun(first_ms, tokens)
