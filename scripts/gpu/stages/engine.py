"""Stage `engine`: a runner at the shapes of 1B and 8B models, prompts and decode steps, and a profile of its steps.

There is no scheduler, no checkpoint and no prompt in front of decode steps: weights and cache are made on the device.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, replace

from baton.messages.sampling import SamplingParams
from baton.runner.model_runner import TorchModelRunner
from gpu.made_model import BLOCK_SIZE, DTYPES, made_runner
from gpu.profile import profiled
from gpu.room import device_of, free_bytes, has_room
from gpu.shapes import LLAMA_1B, LLAMA_8B, TINY, Shape
from gpu.stage import StageContext
from gpu.steps import WARM_UP, blocks_for, decode_steps, decoding, prompt_seconds, some_tokens, timed_step
from tests.support.runner_driver import RunnerDriver

SECONDS = 110

LOADING = 2.2
"""The memory that a model needs while it is made, as a multiple of its weights: fused ones are copies at first."""
KINDS = {
    "greedy": SamplingParams(temperature=0.0, ignore_eos=True),
    "temperature": SamplingParams(temperature=0.8, seed=7, ignore_eos=True),
    "top_p": SamplingParams(temperature=0.8, top_p=0.95, seed=7, ignore_eos=True),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured of a shape."""

    shape: Shape
    prompts: tuple[int, ...]
    batches: tuple[int, ...]
    sampled_batches: tuple[int, ...]
    context: int
    """Tokens before those of decode steps."""
    steps: int
    compared_batch: int
    """The batch that is decoded with and without graphs."""
    profiled_batches: tuple[int, ...] = ()
    profiled_prompt: int = 0

    @property
    def num_blocks(self) -> int:
        """The blocks that the largest size needs; the check at start needs a few in any case."""
        tokens = self.context + 2 + WARM_UP + self.steps
        decoding = max(self.batches) * -(-tokens // BLOCK_SIZE)
        return max(decoding + 1, _blocks_of_prompt(max(self.prompts)), 33)


def _blocks_of_prompt(tokens: int) -> int:
    """The blocks of one prompt and the token after it, and the null block."""
    return 2 + -(-tokens // BLOCK_SIZE)


FULL = (
    Plan(
        LLAMA_1B,
        prompts=(128, 512, 2048, 8192),
        batches=(1, 8, 16, 64, 128, 256),
        sampled_batches=(1, 16, 64, 128),
        context=512,
        steps=20,
        compared_batch=16,
        profiled_batches=(1, 64),
        profiled_prompt=512,
    ),
    Plan(LLAMA_8B, (128, 512, 2048, 8192), (1, 8, 16, 64, 128, 256), (1, 16, 64), 512, 20, compared_batch=16),
)
SMALL = (
    Plan(TINY, (3, 9), (2,), (2,), context=24, steps=1, compared_batch=2, profiled_batches=(1,), profiled_prompt=3),
)


def run(context: StageContext) -> None:
    """Run the stage."""
    for plan in SMALL if context.tiny else FULL:
        _measure(context, plan)
        gc.collect()


def _measure(context: StageContext, plan: Plan) -> None:
    device, shape = device_of(context), plan.shape
    item = DTYPES[device.type].itemsize
    block_bytes = shape.kv_elements * BLOCK_SIZE * item
    weights = shape.num_weights * item * LOADING
    fewest = _blocks_of_prompt(max(plan.prompts))
    if not has_room(context, f"{shape.name} runner", num_bytes=weights + fewest * block_bytes, seconds=10):
        return
    num_blocks = min(plan.num_blocks, int((free_bytes(device) - weights) // block_bytes))
    started = time.perf_counter()
    runner = made_runner(shape, device, num_blocks)
    paths = {path.part: f"{path.runs} {path.why_not_faster}".strip() for path in runner.model.compute_paths}
    context.report(
        "runner",
        shape=shape.name,
        seconds=time.perf_counter() - started,
        weights_gb=runner.model.weight_bytes / 1e9,
        cache_gb=num_blocks * block_bytes / 1e9,
        dtype=runner.model.dtype,
        numerics=runner.model.numerics,
        paths=paths,
    )
    context.check(f"{shape.name} is bit-exact", runner.model.bit_exact, reason=runner.model.bit_exact_reason)
    _prompts(context, plan, runner)
    for batch in plan.batches:
        _decode(context, plan, runner, batch, "greedy")
    for kind in ("temperature", "top_p"):
        for batch in plan.sampled_batches:
            _decode(context, plan, runner, batch, kind)
    _profile(context, plan, runner)
    _without_graphs(context, plan, runner)


def _prompts(context: StageContext, plan: Plan, runner: TorchModelRunner) -> None:
    for tokens in plan.prompts:
        if not has_room(context, f"{plan.shape.name} prompt of {tokens}", seconds=4):
            continue
        seconds = sorted(prompt_seconds(runner, tokens, repeats=2 if context.tiny else 5))
        context.report(
            "prompt",
            shape=plan.shape.name,
            tokens=tokens,
            ms_min=seconds[0] * 1e3,
            ms=seconds[len(seconds) // 2] * 1e3,
            tokens_per_s=tokens / seconds[0],
        )


def _decode(context: StageContext, plan: Plan, runner: TorchModelRunner, batch: int, kind: str) -> list[list[int]]:
    """Report the decode steps of a batch, and return their tokens; none where there is no room."""
    shape, steps = plan.shape, plan.steps
    name = f"{shape.name} decode {batch} {kind}"
    needed = blocks_for(runner.layout, batch, plan.context + 2 + WARM_UP + steps)
    if needed > runner.memory.num_blocks:
        context.report(name, left_out=f"needs {needed} blocks, and the cache has {runner.memory.num_blocks}")
        return []
    if not has_room(context, name, seconds=6):
        return []
    params = replace(KINDS[kind], max_tokens=2 + WARM_UP + steps)
    replays = _replays(runner)
    decoded = decode_steps(runner, batch, plan.context, params, steps, limit_s=1.5)
    context.report(
        "decode",
        shape=shape.name,
        batch=batch,
        context=plan.context,
        sampling=kind,
        graphs=_replays(runner) > replays,
        ms=decoded.ms,
        ms_p10=decoded.quantile_ms(0.1),
        ms_p90=decoded.quantile_ms(0.9),
        tokens_per_s=batch / decoded.ms * 1e3,
        steps=len(decoded.seconds),
    )
    return [list(tokens) for tokens in decoded.tokens]


def _replays(runner: TorchModelRunner) -> int:
    """How many steps of this runner were replays of a graph so far."""
    graphs = runner._transformer.decode_graphs
    return 0 if graphs is None else graphs.num_replays


def _without_graphs(context: StageContext, plan: Plan, runner: TorchModelRunner) -> None:
    """Decode with graphs and then, for the rest of the runner's life, without: the tokens must be equal."""
    shape, batch = plan.shape, plan.compared_batch
    with_graphs = _decode(context, plan, runner, batch, "greedy")
    runner._transformer.decode_graphs = None
    without = _decode(context, plan, runner, batch, "greedy")
    count = min(len(tokens) for tokens in (*with_graphs, *without)) if with_graphs and without else 0
    if count:
        same = [tokens[:count] for tokens in with_graphs] == [tokens[:count] for tokens in without]
        context.check(f"{shape.name} tokens with and without graphs", same, tokens=count * batch)


def _profile(context: StageContext, plan: Plan, runner: TorchModelRunner) -> None:
    device, count = device_of(context), 1 if context.tiny else 3
    params = SamplingParams(temperature=0.0, max_tokens=32)
    for batch in plan.profiled_batches:
        if has_room(context, f"{plan.shape.name} profile of {batch}", seconds=6):
            driver = decoding(runner, batch, plan.context, params)
            step = dict.fromkeys(driver.requests, 1)
            timed_step(driver, step)
            profile = profiled(lambda driver=driver, step=step: timed_step(driver, step), count, device)  # type: ignore[misc]
            driver.step({}, finished=list(driver.requests))
            context.report("profile", shape=plan.shape.name, of=f"a decode step of {batch}", **profile)
    tokens = plan.profiled_prompt
    if tokens and has_room(context, f"{plan.shape.name} profile of a prompt", seconds=6):
        driver = RunnerDriver(runner)
        driver.add("prompt", some_tokens(0, tokens, runner.model.vocab_size), params)
        profile = profiled(lambda: timed_step(driver, {"prompt": tokens}), 1, device)
        driver.step({}, finished=["prompt"])
        context.report("profile", shape=plan.shape.name, of=f"a prompt of {tokens}", **profile)
