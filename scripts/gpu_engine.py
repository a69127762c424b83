"""Measures a runner on a GPU, without a scheduler, with and without CUDA graphs. It takes some minutes.

With `--stages N` it measures only what it costs that a model is in stages, all on the one GPU.

With `--sharing` it measures only what it brings that rows attend together to blocks that they share, in attention alone
and in decode steps. Both are computed with and without, and the results are compared.

The model has random weights in bfloat16: a llama of 1.2 billion parameters (16 layers, hidden 2048, 32 query and 8 KV
heads of 64, intermediate 8192, vocabulary 128,256, tied). A prompt is computed in one step, its first token included.
"""

from __future__ import annotations

import argparse
import platform
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers

from baton.messages.sampling import SamplingParams
from baton.runner.backends.cpu.kernels.cache import CacheView
from baton.runner.backends.cuda.cuda_operations import CudaOperations
from baton.runner.backends.cuda.graph_recording import GpuRecorder, Record
from baton.runner.backends.cuda.shared_splits import find_shared_splits
from baton.runner.loading import load_runner
from baton.runner.model.random_model import write_random_model
from baton.runner.model_runner import TorchModelRunner
from baton.runner.remote_stages.stage_leader import StageLeader
from baton.runner.remote_stages.stages_here import start_on
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
SHARED, OWN = 1024, 512
"""Tokens of a context that all requests share, and those of each request alone."""
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 64, 16
CALLS = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sharing", action="store_true", help="only requests that share a prefix")
    parser.add_argument("--stages", type=int, help="only so many stages on this GPU, beside one process, in turns")
    arguments = parser.parse_args()
    only_sharing, num_stages = arguments.sharing, arguments.stages
    print(
        f"{torch.cuda.get_device_name()}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as directory:
        write_random_model(Path(directory), LLAMA, 0, "bfloat16")
        runner = load_runner(Path(directory), dtype="bfloat16", num_blocks=12000, device="cuda")
        if num_stages:
            _compare_stages(Path(directory), runner, num_stages)
            return
    for path in runner.model.compute_paths:
        print(f"{path.part + ':':12}{path.runs} {path.why_not_faster}")
    print(f"bit-exact:  {'yes' if runner.model.bit_exact else runner.model.bit_exact_reason}")
    for batch in BATCHES[2:]:
        print(attention_of_sharers(batch, SHARED, OWN, torch.device("cuda"), GpuRecorder()), flush=True)
        _decode_sharing(runner, batch)
    if only_sharing:
        return
    for tokens in PROMPTS:
        seconds = sorted(_prefill(runner, prompt) for prompt in _prompts(4, tokens))
        print(f"prefill {tokens}: {tokens / seconds[0]:.0f} tokens/s, {seconds[0] * 1e3:.1f} ms at best", flush=True)
    _decode(runner, "with graphs")
    runner._transformer.decode_graphs = None
    _decode(runner, "without graphs")


def _compare_stages(directory: Path, alone: TorchModelRunner, count: int) -> None:
    """What it takes that stages hand rows on: all are on one GPU, so that they compute no faster than one process."""

    def start_here(model_dir: Path, count: int, num_threads: int, where: torch.device) -> StageLeader:
        return start_on([str(where)] * (count - 1), model_dir, num_threads)

    divided = load_runner(
        directory,
        dtype="bfloat16",
        num_blocks=12000,
        device="cuda",
        pipeline_parallel=count,
        start_stages=start_here,
    )
    print(f"stages: {divided.model.compute_paths[-1].runs}; bit-exact: {divided.model.bit_exact}")
    for turn in range(2):
        for name, runner in (("one process", alone), (f"{count} stages", divided)):
            for tokens in PROMPTS:
                seconds = sorted(_prefill(runner, prompt) for prompt in _prompts(4, tokens))
                print(f"turn {turn}: prefill {tokens}, {name}: {seconds[0] * 1e3:.1f} ms at best", flush=True)
            _decode(runner, f"turn {turn}, {name}", (1, 16, 64))
    divided.close()


def _prefill(runner: TorchModelRunner, prompt: list[int]) -> float:
    driver = RunnerDriver(runner)
    driver.add("prompt", prompt, SamplingParams(temperature=0.0, max_tokens=1))
    return _timed_step(driver, {"prompt": len(prompt)})


def _decode(runner: TorchModelRunner, name: str, batches: Sequence[int] = BATCHES) -> None:
    for batch in batches:
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


def attention_of_sharers(batch: int, shared: int, own: int, device: torch.device, record: Record) -> str:
    """The times of one layer's attention of decode rows that share `shared` tokens and have `own` more, in a line."""
    # Triton is there only where torch was built for GPUs.
    from baton.runner.backends.cuda.triton_attention import triton_attention

    common, single = shared // BLOCK_SIZE, own // BLOCK_SIZE
    half = KV_HEADS * BLOCK_SIZE * HEAD_DIM
    num_blocks = 1 + common + batch * single
    numbers = 1 + torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(0)).to(torch.int32)
    tables = torch.cat([numbers[:common].expand(batch, -1), numbers[common:].view(batch, single)], dim=1)
    lengths = torch.full((batch,), shared + own, dtype=torch.int32)
    sharing = find_shared_splits(tables.numpy(), lengths.numpy(), BLOCK_SIZE)
    assert sharing is not None
    memory = torch.randn(num_blocks * 2 * half, device=device).to(torch.bfloat16)
    cache = CacheView(memory, num_blocks, 2 * half, 0, half, KV_HEADS, BLOCK_SIZE, HEAD_DIM, HEAD_DIM)
    query = torch.randn(batch, HEADS, HEAD_DIM, device=device).to(torch.bfloat16)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=device)
    step = (query, cache, starts, lengths.to(device), tables.to(device))
    times, results = [], []
    for places in (None, torch.from_numpy(sharing).to(device)):

        def attend(places: torch.Tensor | None = places) -> torch.Tensor:
            for _ in range(CALLS):
                out = triton_attention(*step, scale=HEAD_DIM**-0.5, sharing=places)
            return out

        graph, result = record(attend)
        seconds = []
        for _ in range(24):
            started = time.perf_counter()
            graph.replay()
            torch.cuda.synchronize()
            seconds.append((time.perf_counter() - started) / CALLS)
            results.append(result.cpu())
        times.append(median(seconds[4:]) * 1e6)
    same = all(torch.equal(result, results[0]) for result in results)
    return (
        f"attention of {batch} rows with {shared} tokens shared and {own} not: {times[0]:.1f} us, together "
        f"{times[1]:.1f} us, ratio {times[1] / times[0]:.2f}, bits {'equal' if same else 'DIFFER'}"
    )


def _decode_sharing(runner: TorchModelRunner, batch: int) -> None:
    operations = runner._transformer._operations
    assert isinstance(operations, CudaOperations)
    together = set(operations._together)
    medians, outputs = [], []
    for kinds in (set(), together):
        operations._together = kinds
        driver = RunnerDriver(runner)
        prefix = _prompts(1, SHARED)[0]
        blocks: Sequence[int] = ()
        for number, tail in enumerate(_prompts(batch, OWN)):
            params = SamplingParams(temperature=0.0, max_tokens=40)
            start = SHARED if blocks else 0
            request = driver.add(str(number), [*prefix, *tail], params, num_computed=start, shared=blocks)
            driver.step({str(number): SHARED + OWN - start})
            blocks = request.block_ids[: SHARED // runner.layout.block_size]
        step = {str(number): 1 for number in range(batch)}
        medians.append(median([_timed_step(driver, step) for _ in range(24)][4:]) * 1e3)
        outputs.append([request.output for request in driver.requests.values()])
    print(
        f"decode {batch} with {SHARED} tokens shared and {OWN} not: {medians[0]:.2f} ms a step, together "
        f"{medians[1]:.2f} ms, ratio {medians[1] / medians[0]:.2f}, tokens "
        f"{'equal' if outputs[0] == outputs[1] else 'DIFFER'}",
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
