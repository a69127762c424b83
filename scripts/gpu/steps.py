"""Times steps of a runner, without a scheduler: prompts that one step computes, and decode steps of a batch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from baton.engine.runner import KVLayout
from baton.messages.sampling import SamplingParams
from baton.runner.model_runner import TorchModelRunner
from tests.support.runner_driver import RunnerDriver

WARM_UP = 4
"""Decode steps before those that are timed: the first ones record a graph."""
_FEWEST = 3
"""So many decode steps are timed however long they take."""


@dataclass(frozen=True, slots=True)
class DecodeSteps:
    """Decode steps of a batch, the first ones left out."""

    seconds: Sequence[float]
    tokens: Sequence[Sequence[int]]
    """The tokens of each request, those of the first steps included."""

    @property
    def ms(self) -> float:
        """The median step in milliseconds."""
        return median(self.seconds) * 1e3

    def quantile_ms(self, share: float) -> float:
        """The step below which this share of the steps lies, in milliseconds."""
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1e3


def blocks_for(layout: KVLayout, requests: int, tokens: int) -> int:
    """The blocks of so many requests of so many tokens, and the null block."""
    return 1 + requests * -(-tokens // layout.block_size) * len(layout.groups)


def prompt_seconds(runner: TorchModelRunner, tokens: int, repeats: int) -> list[float]:
    """Seconds of steps that each compute one whole prompt and sample its first token; each prompt is another one."""
    seconds = []
    for number in range(repeats):
        driver = RunnerDriver(runner)
        prompt = some_tokens(number, tokens, runner.model.vocab_size)
        driver.add("prompt", prompt, SamplingParams(temperature=0.0, max_tokens=1))
        seconds.append(timed_step(driver, {"prompt": tokens}))
        driver.step({}, finished=["prompt"])
    return seconds


def decode_steps(
    runner: TorchModelRunner, batch: int, context: int, params: SamplingParams, steps: int, limit_s: float
) -> DecodeSteps:
    """Time up to `steps` decode steps of `batch` requests, or as many as `limit_s` seconds allow.

    The requests begin behind `context` tokens that the cache is said to hold, so no prompt is computed. `params` must
    have max_tokens for all steps.
    """
    driver = decoding(runner, batch, context, params)
    step = dict.fromkeys(driver.requests, 1)
    seconds: list[float] = []
    started = time.perf_counter()
    for number in range(WARM_UP + steps):
        if len(seconds) >= _FEWEST and time.perf_counter() - started > limit_s:
            break
        taken = timed_step(driver, step)
        if number >= WARM_UP:
            seconds.append(taken)
    tokens = [request.output for request in driver.requests.values()]
    driver.step({}, finished=list(driver.requests))
    return DecodeSteps(seconds, tokens)


def decoding(runner: TorchModelRunner, batch: int, context: int, params: SamplingParams) -> RunnerDriver:
    """A driver of `batch` requests, each of which continues behind `context` tokens of the cache with its next step."""
    driver = RunnerDriver(runner)
    for number in range(batch):
        prompt = some_tokens(number, context + 1, runner.model.vocab_size)
        driver.add(str(number), prompt, params, num_computed=context)
    return driver


def timed_step(driver: RunnerDriver, shares: dict[str, int]) -> float:
    """The seconds of one step, which computes so many tokens of each request. Raises RuntimeError if one fails."""
    started = time.perf_counter()
    out = driver.step(shares)
    taken = time.perf_counter() - started
    if out.failed:
        raise RuntimeError(f"requests failed: {out.failed}")
    return taken


def some_tokens(number: int, tokens: int, vocab_size: int) -> list[int]:
    """The tokens of prompt `number`; prompts of numbers below 256 begin with different tokens."""
    return [(7 * position + 13 * number) % min(1000, vocab_size) for position in range(tokens)]
