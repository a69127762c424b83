"""`baton bench engine --tp --pp`: a model on several ranks, by turns with the same model on as many threads of one
process.

Both engines compute the same prompts and batches, in turns, so that drift of the machine's speed affects both. Stages
are given several prompts at once, and each step while the one before it is computed, as a node gives them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from statistics import median

from baton.bench.micro.engine import EngineBenchConfig
from baton.bench.micro.engine_drive import EngineDrive, by_turns, load_with_room, rates_by_turns
from baton.engine.runner import ModelRunner
from baton.messages.node_model import NodeShape
from baton.runner import TorchSpec, load
from baton.runner.execution.step_thread import StepThread

_BATCHES = (1, 8, 16)
_ROUNDS = 6
_PROMPTS_OF_A_STAGE = 2
"""How many prompts are computed at once for each stage."""


@dataclass(frozen=True, slots=True)
class RanksFigures:
    """One kind of step; medians over the rounds."""

    step: str
    """`prefill`, or `decode` and the batch size."""
    tokens_per_s: float
    """Tokens a second on ranks."""
    one_process_tokens_per_s: float
    ratio: float
    """How many times as fast the ranks are."""
    ratio_p10: float
    ratio_p90: float


def measure(config: EngineBenchConfig, ranks: NodeShape) -> list[RanksFigures]:
    """Measure prefill, and decoding at each batch size, with all threads in one process and divided among ranks.

    Raises ConfigError.
    """

    def num_stripes(block_size: int) -> int:
        return 2 + max(_BATCHES) * (-(-(config.context_tokens + config.steps + 4) // block_size) + 1)

    specs = [
        replace(config.spec(), tensor_parallel=shape.tp, pipeline_parallel=shape.pp) for shape in (NodeShape(), ranks)
    ]

    def loaded(spec: TorchSpec) -> ModelRunner:
        return load_with_room(lambda num_blocks: load(replace(spec, num_blocks=num_blocks)), num_stripes)

    executors = (None, StepThread() if ranks.pp > 1 else None)
    at_once = 1 if ranks.pp == 1 else _PROMPTS_OF_A_STAGE * ranks.pp
    with ExitStack() as stack:
        whole, divided = (stack.enter_context(closing(loaded(spec))) for spec in specs)
        drives = [
            stack.enter_context(closing(EngineDrive(runner, config.context_tokens, max(_BATCHES), executor)))
            for runner, executor in zip((whole, divided), executors, strict=True)
        ]
        rng = Random(0)
        length, vocab_size = config.context_tokens, whole.model.vocab_size
        prompts = [[rng.randrange(vocab_size) for _ in range(length)] for _ in range(max(_BATCHES))]

        def prefill(drive: EngineDrive, turn: int) -> float:
            turns = [[turn, *prompts[(turn + index) % len(prompts)][1:]] for index in range(at_once)]
            return drive.prefill(*turns) / at_once

        def decode(drive: EngineDrive, turn: int, batch: int) -> float:
            return median(drive.decode(prompts[:batch], max(1, config.steps // _ROUNDS)))

        def figures(step: str, num_tokens: int, seconds: Callable[[EngineDrive, int], float]) -> RanksFigures:
            single, several = drives
            turns = by_turns(partial(seconds, several), partial(seconds, single), _ROUNDS)
            return RanksFigures(step, *rates_by_turns(num_tokens, *turns))

        results = [figures("prefill", length, prefill)]
        for prompt in prompts:
            for drive in drives:
                drive.prefill(prompt)
        return results + [figures(f"decode {batch}", batch, partial(decode, batch=batch)) for batch in _BATCHES]
