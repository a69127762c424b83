"""`baton bench engine --adapters`: steps whose requests have adapters, by turns with the same steps without any.

Every adapter changes all products of the layers. One engine computes both, so that drift of the machine's speed affects
both.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from baton.bench.micro.engine import EngineBenchConfig
from baton.bench.micro.engine_drive import EngineDrive, by_turns, load_with_room, rates_by_turns
from baton.messages.adapters import NO_ADAPTER
from baton.messages.node_model import NodeShape
from baton.model_formats.adapters import CONFIG_NAME, DEFAULT_MAX_RANK, WEIGHTS_NAME, open_adapter

if TYPE_CHECKING:
    from baton.runner.model_runner import TorchModelRunner


# Writes adapters of random numbers as PEFT writes them, for benchmarks and tests; without torch.


PREFIX = "base_model.model."

Tensors = Mapping[str, npt.NDArray[Any]]


def lora_tensors(
    modules: Mapping[str, tuple[int, int]], rank: int = 4, seed: int = 0, scale: float = 1.0
) -> dict[str, npt.NDArray[np.float32]]:
    """Random tensors A and B for modules, by names, each with its numbers of outputs and inputs."""
    random = np.random.default_rng(seed)
    tensors: dict[str, npt.NDArray[np.float32]] = {}
    for module, (outputs, inputs) in modules.items():
        a = random.standard_normal((rank, inputs), dtype=np.float32)
        b = random.standard_normal((outputs, rank), dtype=np.float32)
        tensors[f"{PREFIX}{module}.lora_A.weight"] = a * np.float32(scale)
        tensors[f"{PREFIX}{module}.lora_B.weight"] = b * np.float32(scale)
    return tensors


def write_adapter(directory: Path, tensors: Tensors, rank: int = 4, **settings: object) -> Path:
    """Write an adapter's two files; `settings` go over those of a plain LoRA adapter. Returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    targets = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in tensors})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": targets, **settings}
    (directory / CONFIG_NAME).write_text(json.dumps(config), encoding="utf-8")
    (directory / WEIGHTS_NAME).write_bytes(safetensors_bytes(tensors))
    return directory


def safetensors_bytes(tensors: Tensors) -> bytes:
    """The content of a safetensors file with these tensors."""
    names = {np.dtype(np.float32): "F32", np.dtype(np.float16): "F16"}
    header: dict[str, object] = {}
    at = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": names.get(tensor.dtype, "I64"),
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(tensor.tobytes() for tensor in tensors.values())


_ROUNDS = 6
_ONE_PROCESS = NodeShape()


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


def measure(
    config: EngineBenchConfig, num_adapters: int, rank: int, shape: NodeShape = _ONE_PROCESS
) -> list[AdapterFigures]:
    """Measure prefill with an adapter, and decoding a batch of `num_adapters` requests with as many adapters, and with
    one. Raises ConfigError.

    `shape`: the ranks and stages that compute all of it.
    """
    from baton.runner.loading import load_runner

    count, length = num_adapters, config.context_tokens
    spec = replace(
        config.spec(),
        max_lora_rank=max(rank, DEFAULT_MAX_RANK),
        tensor_parallel=shape.tp,
        pipeline_parallel=shape.pp,
    )

    def num_stripes(block_size: int) -> int:
        blocks_of_one = -(-(length + config.steps + 4) // block_size) + 1
        return 2 + (3 * count + 2 * _ROUNDS + 2) * blocks_of_one

    runner = load_with_room(lambda num_blocks: load_runner(replace(spec, num_blocks=num_blocks)), num_stripes)
    with closing(runner), TemporaryDirectory(prefix="baton-adapters-") as folder:
        digests = _load_adapters(runner, Path(folder), count, rank)
        drive = EngineDrive(runner, length, count)
        rng = Random(config.seed)

        def new_prompt() -> list[int]:
            return [rng.randrange(runner.model.vocab_size) for _ in range(length)]

        def figures(step: str, num_tokens: int, own: Callable[[], float], plain: Callable[[], float]) -> AdapterFigures:
            turns = by_turns(lambda _: own(), lambda _: plain(), _ROUNDS)
            return AdapterFigures(step, *rates_by_turns(num_tokens, *turns))

        results = [
            figures(
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
            # The first prompt is in the cache already if its request has had its adapter before.
            known = 1 if different > 1 else 0
            for prompt, adapter in list(zip(prompts, own, strict=True))[known:]:
                drive.prefill(prompt, adapters=[adapter])
            step = f"decode {count}, {_adapters(different)}"
            results.append(figures(step, count, partial(decode, own), partial(decode, [NO_ADAPTER] * count)))
        return results


def _adapters(count: int) -> str:
    return "1 adapter" if count == 1 else f"{count} adapters"


def _load_adapters(runner: TorchModelRunner, folder: Path, count: int, rank: int) -> list[str]:
    modules = {name: shape for name, shape in runner.adaptable_modules.items() if name != "lm_head"}
    digests = []
    for seed in range(count):
        directory = folder / f"{seed}"
        write_adapter(directory, lora_tensors(modules, rank, seed, scale=0.02), rank)
        digests.append(open_adapter(directory).digest())
        runner.adapters.load(directory, digests[-1])
    return digests
