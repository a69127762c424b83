"""Stage `pair`: a prefill and a decode node on the one GPU, with digests of every block and without.

Both pairs and a runner in this process serve one model, whose weights the device makes and which is written to a
temporary folder once. The lane is what UCX itself says that it chose for reads.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from baton.bench.live_cluster import LiveCluster, live_clusters
from baton.bench.micro.handoff import ClusterRun, HandOverTimes, through_cluster
from baton.errors import BatonError
from baton.messages.sampling import SamplingParams
from baton.runner.loading import load_runner
from baton.runner.model.random_model import write_module
from baton.runner.model_runner import TorchModelRunner
from baton.runner.spec import TorchSpec
from gpu.lanes import LANES, lane_lines
from gpu.made_model import BLOCK_SIZE, DTYPES
from gpu.room import device_of, has_room
from gpu.shapes import LLAMA_1B, TINY, Shape, made_module
from gpu.stage import StageContext
from gpu.steps import some_tokens, timed_step
from tests.support.runner_driver import RunnerDriver

SECONDS = 60

_CONTEXT_BYTES = 1 << 30
"""What a process takes of a GPU beside its weights and cache: the context, kernels, workspaces."""
_ROUND_S = 3.0
_END_S = 10.0
"""Seconds before the deadline that are kept for the end of the clusters."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured."""

    shape: Shape
    prompts: tuple[int, ...]
    new_tokens: int
    rounds: int
    max_num_batched_tokens: int
    digests: tuple[str, ...] = ("on", "off")
    """A pair for each of these values of `--kv-digests`."""

    @property
    def num_blocks(self) -> int:
        """The blocks of a node: two of the longest requests, and some more."""
        return 2 * -(-(max(self.prompts) + self.new_tokens) // BLOCK_SIZE) + 64


FULL = Plan(LLAMA_1B, (512, 2048, 8192), new_tokens=16, rounds=4, max_num_batched_tokens=2048)
SMALL = Plan(TINY, (20, 70), new_tokens=4, rounds=2, max_num_batched_tokens=64, digests=("on",))
"""One pair: the second differs in a flag alone, and takes five seconds to start."""


def run(context: StageContext) -> None:
    """Run the stage."""
    context.report("two ranks by IPC", not_built="a model is not divided in columns among GPUs yet (--tp is refused)")
    plan = SMALL if context.tiny else FULL
    item = DTYPES[context.device].itemsize
    cache_bytes = plan.num_blocks * BLOCK_SIZE * plan.shape.kv_elements * item
    # Two pairs and the runner here; whoever loads a model has its weights twice for a moment.
    node_bytes = plan.shape.num_weights * item * 2.2 + cache_bytes + (_CONTEXT_BYTES if context.device == "cuda" else 0)
    if not has_room(context, "pair", num_bytes=5 * node_bytes, seconds=20):
        return
    started = time.perf_counter()
    directory = Path(tempfile.mkdtemp(prefix="baton-gpu-check-"))
    try:
        write_module(directory, made_module(plan.shape, device_of(context), DTYPES[context.device], "sdpa"))
        if context.device == "cuda":
            torch.cuda.empty_cache()
        context.report("model", shape=plan.shape.name, seconds=time.perf_counter() - started)
        with _pairs(context, plan, directory, cache_bytes) as pairs:
            alone = load_runner(
                TorchSpec(
                    directory,
                    dtype=_dtype_name(context),
                    num_blocks=_blocks_alone(plan),
                    device=context.device,
                    allow_unverified=True,
                )
            )
            context.report("nodes are ready", seconds=time.perf_counter() - started)
            _measure(context, plan, pairs, alone)
            for digests, pair in pairs.items():
                _report_lanes(context, digests, pair)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _blocks_alone(plan: Plan) -> int:
    """The blocks of the runner that computes without a pair: one request, and the check at start."""
    return max(plan.num_blocks // 2, 32)


@contextmanager
def _pairs(context: StageContext, plan: Plan, directory: Path, cache_bytes: int) -> Iterator[dict[str, LiveCluster]]:
    """The pairs by their digests; all start at the same time."""
    flags = [
        *("--model", str(directory), "--device", context.device, "--dtype", _dtype_name(context), "--threads", "1"),
        *("--kv-cache-memory", str(cache_bytes), "--max-num-batched-tokens", str(plan.max_num_batched_tokens)),
        *("--allow-unverified", "--start-timeout-s", f"{max(context.seconds_left - _END_S, 1.0):.0f}"),
    ]
    flags_of_clusters = [[*flags, "--kv-digests", digests] for digests in plan.digests]
    with live_clusters(*flags_of_clusters, environment=LANES) as pairs:
        yield dict(zip(plan.digests, pairs, strict=True))


def _dtype_name(context: StageContext) -> str:
    return str(DTYPES[context.device]).removeprefix("torch.")


def _measure(context: StageContext, plan: Plan, pairs: dict[str, LiveCluster], alone: TorchModelRunner) -> None:
    """Send each prompt through both pairs by turns and to the runner; the first round warms up."""
    for place, tokens in enumerate(plan.prompts):
        taken: dict[str, list[tuple[ClusterRun, HandOverTimes]]] = {digests: [] for digests in plan.digests}
        ttft_alone, are_equal, reason = [], True, ""
        for number in range(1 + plan.rounds):
            if not has_room(context, f"round {number} of prompts of {tokens}", seconds=_ROUND_S + _END_S):
                break
            # No two prompts begin alike, so that none is in a node's cache.
            prompt = some_tokens(place * (1 + plan.rounds) + number, tokens, plan.shape.vocab)
            expected, seconds = _alone(alone, prompt, plan.new_tokens)
            for digests in plan.digests if number % 2 else reversed(plan.digests):
                try:
                    ran = through_cluster(pairs[digests], prompt, plan.new_tokens)
                except BatonError as error:
                    are_equal, reason = False, f"{type(error).__name__}: {error}"
                    continue
                are_equal = are_equal and list(ran[0].token_ids) == expected
                if number:
                    taken[digests].append(ran)
            if number:
                ttft_alone.append(seconds * 1e3)
        for digests, ran_all in taken.items():
            if ran_all:
                _report(context, plan, tokens, digests, ran_all, median(ttft_alone))
        if ttft_alone:
            context.check(f"tokens of a prompt of {tokens} are those of one process", are_equal, reason=reason)


def _alone(runner: TorchModelRunner, prompt: Sequence[int], new_tokens: int) -> tuple[list[int], float]:
    """The tokens of a request that one process computes, and the seconds of its prompt in one step."""
    driver = RunnerDriver(runner)
    driver.add("alone", prompt, SamplingParams(temperature=0.0, max_tokens=new_tokens))
    seconds = timed_step(driver, {"alone": len(prompt)})
    driver.finish()
    driver.step({}, finished=["alone"])
    return list(driver.requests["alone"].output), seconds


def _report(
    context: StageContext,
    plan: Plan,
    tokens: int,
    digests: str,
    ran: Sequence[tuple[ClusterRun, HandOverTimes]],
    ttft_alone_ms: float,
) -> None:
    num_bytes = ran[0][0].kv_bytes
    reading_ms = median(one.reading_ms for one, _ in ran)
    context.report(
        "hand-off",
        shape=plan.shape.name,
        tokens=tokens,
        digests=digests,
        ttft_ms=median(one.ttft_ms for one, _ in ran),
        ttft_alone_ms=ttft_alone_ms,
        step_ms=median(one.step_ms for one, _ in ran),
        bytes=num_bytes,
        reading_ms=reading_ms,
        gb_per_s=num_bytes / max(reading_ms, 1e-6) / 1e6,
        after_last_chunk_ms=median(times.transfer_ms for _, times in ran),
        requests=len(ran),
    )


def _report_lanes(context: StageContext, digests: str, pair: LiveCluster) -> None:
    """Report the lanes of reads, which the decode node's UCX wrote into its log."""
    for name, log in pair.logs.items():
        if name.startswith("decode"):
            lanes = lane_lines(log.read_text(errors="replace"))
            context.report("lane", digests=digests, of=name, reads=lanes or "UCX did not say", ucx=_ucx_settings())


def _ucx_settings() -> dict[str, str]:
    """The settings of UCX that this process was started with, and so the nodes."""
    return {name: text for name, text in os.environ.items() if name.startswith("UCX_")}
