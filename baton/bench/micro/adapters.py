"""`baton bench engine --adapters`: steps whose requests have adapters, by turns with the same steps without any.

Every adapter changes all products of the layers. One engine computes both, so that drift of the machine's speed affects
both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from baton.bench.micro.adapter_files import lora_tensors, write_adapter
from baton.bench.micro.engine import EngineBenchConfig
from baton.bench.micro.engine_drive import EngineDrive, load_with_room
from baton.bench.results.spread import Spread
from baton.messages.adapters import NO_ADAPTER
from baton.model_formats.adapters import DEFAULT_MAX_RANK, open_adapter
from baton.runner import TorchSpec

if TYPE_CHECKING:
    from baton.runner.model_runner import TorchModelRunner

_BLOCK_SIZE = 16
_ROUNDS = 6


@dataclass(frozen=True, slots=True)
class AdapterFigures:
    """One kind of step; medians over the rounds."""

    step: str
    """`prefill`, or `decode`, and how many different adapters its requests have."""
    tokens_per_s: float
    """Tokens a second with adapters."""
    plain_tokens_per_s: float
    """The same without."""
    ratio: float
    ratio_p10: float
    ratio_p90: float


def measure(config: EngineBenchConfig, num_adapters: int, rank: int) -> list[AdapterFigures]:
    """Measure prefill with an adapter, and decoding a batch of `num_adapters` requests with as many adapters, and with
    one. Raises ConfigError.
    """
    from baton.runner.loading import load_runner

    count, length = num_adapters, config.context_tokens
    blocks_of_one = -(-(length + config.steps + 4) // _BLOCK_SIZE) + 1
    spec = TorchSpec(
        config.model_dir,
        dtype=config.dtype,
        block_size=_BLOCK_SIZE,
        cache_dtype=config.cache_dtype,
        num_threads=config.threads,
        quantization=config.quantization,
        dequantize=config.dequantize,
        max_lora_rank=max(rank, DEFAULT_MAX_RANK),
    )
    num_stripes = 2 + (3 * count + 2 * _ROUNDS + 2) * blocks_of_one
    runner = load_with_room(lambda num_blocks: load_runner(replace(spec, num_blocks=num_blocks)), num_stripes)
    with closing(runner), TemporaryDirectory(prefix="baton-adapters-") as place:
        digests = _load_adapters(runner, Path(place), count, rank)
        drive = EngineDrive(runner, length, count)
        rng = Random(config.seed)

        def new_prompt() -> list[int]:
            return [rng.randrange(runner.model.vocab_size) for _ in range(length)]

        figures = [
            _by_turns(
                f"prefill, {_adapters(1)}",
                length,
                lambda: drive.prefill(new_prompt(), adapters=digests[:1]),
                lambda: drive.prefill(new_prompt()),
            )
        ]
        prompts = [new_prompt() for _ in range(count)]
        steps = max(1, config.steps // _ROUNDS)

        def decode(adapters: Sequence[str]) -> float:
            return median(drive.decode(prompts, steps, adapters=adapters))

        for prompt in prompts:
            drive.prefill(prompt)
        for different in sorted({1, count}):
            own = [digests[index % different] for index in range(count)]
            # The first one's prompt is in the cache already if it has had its adapter before.
            known = 1 if different > 1 else 0
            for prompt, adapter in list(zip(prompts, own, strict=True))[known:]:
                drive.prefill(prompt, adapters=[adapter])
            figures.append(
                _by_turns(
                    f"decode {count}, {_adapters(different)}",
                    count,
                    lambda own=own: decode(own),  # type: ignore[misc]
                    lambda: decode([NO_ADAPTER] * count),
                )
            )
        return figures


def _adapters(count: int) -> str:
    return "1 adapter" if count == 1 else f"{count} adapters"


def _load_adapters(runner: TorchModelRunner, place: Path, count: int, rank: int) -> list[str]:
    modules = {name: shape for name, shape in runner.adaptable_modules.items() if name != "lm_head"}
    digests = []
    for seed in range(count):
        directory = place / f"{seed}"
        write_adapter(directory, lora_tensors(modules, rank, seed, scale=0.02), rank)
        digests.append(open_adapter(directory).digest())
        runner.adapters.load(directory, digests[-1])
    return digests


def _by_turns(
    step: str, num_tokens: int, with_adapters: Callable[[], float], plain: Callable[[], float]
) -> AdapterFigures:
    """Measure both, which return the seconds of a step, in turns; the first turn warms up."""
    own: list[float] = []
    without: list[float] = []
    for turn in range(_ROUNDS + 1):
        sides = [(with_adapters, own), (plain, without)]
        for work, seconds in sides if turn % 2 else sides[::-1]:
            seconds.append(work())
    pairs = list(zip(own, without, strict=True))[1:]
    ratio = Spread.of([other / one for one, other in pairs])
    return AdapterFigures(
        step,
        num_tokens / median(own[1:]),
        num_tokens / median(without[1:]),
        ratio.median,
        ratio.p10,
        ratio.p90,
    )
