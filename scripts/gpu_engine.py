"""Measures a runner on a GPU, without a scheduler, with and without CUDA graphs. It takes some minutes.

The model has random weights in bfloat16: a llama of 1.2 billion parameters (16 layers, hidden 2048, 32 query and 8 KV
heads of 64, intermediate 8192, vocabulary 128,256, tied). A prompt is computed in one step, its first token included.
"""

from __future__ import annotations

import platform
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers

from baton.messages.sampling import SamplingParams
from baton.runner.model.random_model import write_random_model
from baton.runner.model_runner import TorchModelRunner, load_runner
from tests.support.runner_driver import RunnerDriver

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
PROMPTS = (128, 512, 2048)
BATCHES = (1, 8, 16, 64, 128)
CONTEXT = 512


def main() -> None:
    print(
        f"{torch.cuda.get_device_name()}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as directory:
        write_random_model(Path(directory), LLAMA, 0, "bfloat16")
        runner = load_runner(Path(directory), dtype="bfloat16", num_blocks=12000, device="cuda")
    for path in runner.model.compute_paths:
        print(f"{path.part + ':':12}{path.runs} {path.why_not_faster}")
    print(f"bit-exact:  {'yes' if runner.model.bit_exact else runner.model.bit_exact_reason}")
    for tokens in PROMPTS:
        seconds = sorted(_prefill(runner, prompt) for prompt in _prompts(4, tokens))
        print(f"prefill {tokens}: {tokens / seconds[0]:.0f} tokens/s, {seconds[0] * 1e3:.1f} ms at best", flush=True)
    _decode(runner, "with graphs")
    runner._transformer.decode_graphs = None
    _decode(runner, "without graphs")


def _prefill(runner: TorchModelRunner, prompt: list[int]) -> float:
    driver = RunnerDriver(runner)
    driver.add("prompt", prompt, SamplingParams(temperature=0.0, max_tokens=1))
    return _timed_step(driver, {"prompt": len(prompt)})


def _decode(runner: TorchModelRunner, name: str) -> None:
    for batch in BATCHES:
        driver = RunnerDriver(runner)
        for number, prompt in enumerate(_prompts(batch, CONTEXT)):
            driver.add(str(number), prompt, SamplingParams(temperature=0.0, max_tokens=40))
            driver.step({str(number): CONTEXT})
        step = {str(number): 1 for number in range(batch)}
        # The first steps record a graph.
        seconds = sorted([_timed_step(driver, step) for _ in range(24)][4:])
        middle, low, high = median(seconds), seconds[2], seconds[17]
        print(
            f"decode {batch} {name}: {batch / middle:.0f} tokens/s, "
            f"{middle * 1e3:.2f} ms a step [{low * 1e3:.2f}, {high * 1e3:.2f}]",
            flush=True,
        )


def _timed_step(driver: RunnerDriver, shares: dict[str, int]) -> float:
    started = time.perf_counter()
    driver.step(shares)
    return time.perf_counter() - started


def _prompts(count: int, tokens: int) -> list[list[int]]:
    return [[(7 * place + number) % 1000 for place in range(tokens)] for number in range(count)]


if __name__ == "__main__":
    main()
