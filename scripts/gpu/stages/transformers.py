"""Stage `transformers`: transformers itself at the shapes of stage `engine`: a static cache, SDPA, products by cuBLAS.

A decode step is measured kernel by kernel and, where it can be recorded, as a CUDA graph: what `torch.compile` with
reduce-overhead brings at best without minutes of compilation. The head computes the last row's logits only, and the
greedy token is chosen on the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from gpu.made_model import DTYPES
from gpu.room import device_of, has_room
from gpu.shapes import LLAMA_1B, LLAMA_8B, TINY, Shape, made_module
from gpu.stage import StageContext
from gpu.steps import some_tokens

SECONDS = 40

_LOGITS_BYTES = 4


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured of a shape; its numbers are those of stage `engine`."""

    shape: Shape
    prompts: tuple[int, ...]
    batches: tuple[int, ...]
    context: int


FULL = (
    Plan(LLAMA_1B, (128, 512, 2048, 8192), (1, 16, 64), 512),
    Plan(LLAMA_8B, (128, 512, 2048, 8192), (1, 16, 64), 512),
)
SMALL = (Plan(TINY, (3, 9), (1, 2), 24),)
_MORE = 64
"""Places of the static cache behind the context, for the tokens of decode steps."""


def run(context: StageContext) -> None:
    """Run the stage."""
    with torch.inference_mode():
        made = [(plan, _module(context, plan)) for plan in (SMALL if context.tiny else FULL)]
        measured = [(plan, module) for plan, module in made if module is not None]
        for plan, module in measured:
            _measure(context, plan, module)
        if context.device == "cuda":
            # Last: of a recording that fails torch keeps the stream, the pool and the state of random numbers.
            for plan, module in measured:
                _measure_graphs(context, plan, module)


def _module(context: StageContext, plan: Plan) -> Any | None:
    """A module of a plan's shape; None where there is no room."""
    import transformers

    device, shape = device_of(context), plan.shape
    dtype = DTYPES[device.type]
    if not has_room(context, f"{shape.name} module", num_bytes=shape.num_weights * dtype.itemsize * 1.1, seconds=5):
        return None
    started = time.perf_counter()
    module = made_module(shape, device, dtype, "sdpa")
    context.report("module", shape=shape.name, seconds=time.perf_counter() - started, version=transformers.__version__)
    return module


def _measure(context: StageContext, plan: Plan, module: Any) -> None:
    shape, item = plan.shape, DTYPES[context.device].itemsize
    for tokens in plan.prompts:
        num_bytes = tokens * _bytes_of_token(shape, item)
        if has_room(context, f"{shape.name} prompt of {tokens}", num_bytes=num_bytes, seconds=3):
            _prompt(context, shape, module, tokens)
    for batch in plan.batches:
        if has_room(context, f"{shape.name} decode {batch}", num_bytes=_decode_bytes(plan, batch, item), seconds=4):
            _decode(context, plan, module, batch)


def _measure_graphs(context: StageContext, plan: Plan, module: Any) -> None:
    for batch in plan.batches:
        name, num_bytes = _graph_name(plan, batch), _decode_bytes(plan, batch, DTYPES[context.device].itemsize)
        if has_room(context, name, num_bytes=num_bytes, seconds=4):
            _decode_as_graph(context, plan, module, batch)


def _decode_bytes(plan: Plan, batch: int, item: int) -> int:
    return batch * (plan.context + _MORE) * _bytes_of_token(plan.shape, item)


def _graph_name(plan: Plan, batch: int) -> str:
    return f"{plan.shape.name} decode {batch} as a graph"


def _bytes_of_token(shape: Shape, item: int) -> int:
    """Bytes that a token of a prompt takes at most: keys and values, and the widest rows of a layer."""
    return item * (shape.kv_elements + 3 * shape.intermediate + 8 * shape.hidden) + _LOGITS_BYTES


class _Sequence:
    """Sequences of equal length in a static cache: computes the tokens that follow, all of them greedily."""

    def __init__(self, module: Any, batch: int, max_tokens: int) -> None:
        from transformers import StaticCache

        self._module = module
        self._cache = StaticCache(config=module.config, max_cache_len=max_tokens)
        self._positions = torch.zeros(1, 1, dtype=torch.int64, device=module.device)
        self.tokens = torch.zeros(batch, 1, dtype=torch.int64, device=module.device)
        """The tokens that were chosen last: [batch, 1]."""

    def prefill(self, prompts: torch.Tensor) -> None:
        """Compute prompts [batch, T] from the cache's beginning."""
        self._cache.reset()
        positions = torch.arange(prompts.shape[1], device=prompts.device)[None]
        self._compute(prompts, positions)
        self._positions.fill_(prompts.shape[1])

    def step(self) -> None:
        """Compute the tokens that were chosen last. Nothing is read from the device."""
        self._compute(self.tokens, self._positions)
        self._positions.add_(1)

    def _compute(self, tokens: torch.Tensor, positions: torch.Tensor) -> None:
        out = self._module(
            input_ids=tokens, position_ids=positions, past_key_values=self._cache, use_cache=True, logits_to_keep=1
        )
        self.tokens.copy_(out.logits[:, -1:].argmax(-1))


def _prompt(context: StageContext, shape: Shape, module: Any, tokens: int) -> None:
    sequence = _Sequence(module, 1, tokens)
    prompt = torch.tensor([some_tokens(0, tokens, shape.vocab)], device=module.device)
    timing = context.time(lambda: sequence.prefill(prompt), repeats=4, warm_up=1)
    context.report(
        "prompt",
        shape=shape.name,
        tokens=tokens,
        ms=timing.ms,
        ms_min=timing.ms_min,
        tokens_per_s=tokens / timing.ms_min * 1e3,
    )


def _decode(context: StageContext, plan: Plan, module: Any, batch: int) -> None:
    sequence = _behind_context(plan, module, batch)
    _report(context, plan, batch, _timed(context, sequence.step, _steps(context)), graphs=False)


def _decode_as_graph(context: StageContext, plan: Plan, module: Any, batch: int) -> None:
    """Measure steps as a CUDA graph, or report why none could be recorded."""
    sequence, graph = _behind_context(plan, module, batch), torch.cuda.CUDAGraph()
    sequence.step()
    try:
        with torch.cuda.graph(graph):
            sequence.step()
    except RuntimeError as error:
        reason = (str(error).splitlines() or [""])[0]
        context.report(_graph_name(plan, batch), left_out=f"can't be recorded: {reason:.200}")
        return
    _report(context, plan, batch, _timed(context, graph.replay, _steps(context)), graphs=True)


def _steps(context: StageContext) -> int:
    return 3 if context.tiny else 20


def _behind_context(plan: Plan, module: Any, batch: int) -> _Sequence:
    """Sequences whose next step is the first one behind the plan's context."""
    sequence = _Sequence(module, batch, plan.context + _MORE)
    prompts = [some_tokens(number, plan.context, plan.shape.vocab) for number in range(batch)]
    sequence.prefill(torch.tensor(prompts, device=module.device))
    return sequence


def _timed(context: StageContext, step: Callable[[], None], steps: int) -> list[float]:
    """Seconds of single steps, each with the wait for its tokens, which a server needs before the next one."""
    seconds = []
    for number in range(2 + steps):
        started = time.perf_counter()
        step()
        if context.device == "cuda":
            torch.cuda.synchronize()
        if number > 1:
            seconds.append(time.perf_counter() - started)
    return seconds


def _report(context: StageContext, plan: Plan, batch: int, seconds: list[float], *, graphs: bool) -> None:
    ms = median(seconds) * 1e3
    context.report(
        "decode",
        shape=plan.shape.name,
        batch=batch,
        context=plan.context,
        sampling="greedy",
        graphs=graphs,
        ms=ms,
        tokens_per_s=batch / ms * 1e3,
        steps=len(seconds),
    )
