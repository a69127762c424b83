"""Measures on a GPU what it brings that rows share a prefix, and what it costs that a model is in stages.

With `--sharing` rows attend together to blocks that they share, in attention alone and in decode steps. Both are
computed with and without, and the results are compared. With `--stages N` a model's stages are all on the one GPU.

The model has the shape and the weights of stage `engine` of scripts/gpu_check, which measures plain steps: a llama of
1.2 billion parameters in bfloat16 (16 layers, hidden 2048, 32 query and 8 KV heads of 64, vocabulary 128,256, tied).
"""

from __future__ import annotations

import argparse
import platform
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
import transformers
from gpu.made_model import BLOCK_SIZE, made_runner
from gpu.shapes import LLAMA_1B, made_module
from gpu.steps import decode_steps, prompt_seconds, some_tokens, timed_step

from baton.messages.sampling import SamplingParams
from baton.runner.backends.attention_call import AttentionCall, AttentionFeatures
from baton.runner.backends.attention_work.step_work import StepWork
from baton.runner.backends.cuda.cuda_operations import CudaOperations
from baton.runner.backends.cuda.graph_recording import GpuRecorder, Record
from baton.runner.backends.cuda.shared_splits import find_shared_splits
from baton.runner.backends.device import resolve_device
from baton.runner.backends.paged_cache import CacheView
from baton.runner.loading import load_runner
from baton.runner.model.random_model import write_module
from baton.runner.model_runner import TorchModelRunner
from baton.runner.spec import TorchSpec
from baton.runner.stages.stage_leader import StageLeader
from baton.runner.stages.stages_here import start_on
from tests.support.runner_driver import RunnerDriver

PROMPTS = (128, 512, 2048)
SHARERS = (16, 64, 128)
CONTEXT = 512
SHARED, OWN = 1024, 512
"""Tokens of a context that all requests share, and those of each request alone."""
HEADS, KV_HEADS, HEAD_DIM = LLAMA_1B.heads, LLAMA_1B.kv_heads, LLAMA_1B.head_dim
NUM_BLOCKS = 12000
CALLS = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--sharing", action="store_true", help="requests that share a prefix")
    what.add_argument("--stages", type=int, help="so many stages on this GPU, beside one process, in turns")
    arguments = parser.parse_args()
    print(
        f"{torch.cuda.get_device_name()}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}",
        flush=True,
    )
    device = resolve_device("cuda")
    if arguments.stages:
        with tempfile.TemporaryDirectory() as directory:
            write_module(Path(directory), made_module(LLAMA_1B, device, torch.bfloat16, "sdpa"))
            torch.cuda.empty_cache()
            runner = load_runner(TorchSpec(Path(directory), dtype="bfloat16", num_blocks=NUM_BLOCKS, device="cuda"))
            _compare_stages(Path(directory), runner, arguments.stages)
        return
    runner = made_runner(LLAMA_1B, device, NUM_BLOCKS)
    print(f"bit-exact: {'yes' if runner.model.bit_exact else runner.model.bit_exact_reason}")
    for batch in SHARERS:
        print(attention_of_sharers(batch, SHARED, OWN, device, GpuRecorder()), flush=True)
        _decode_sharing(runner, batch)


def _compare_stages(directory: Path, alone: TorchModelRunner, count: int) -> None:
    """What it takes that stages hand rows on: all are on one GPU, so that they compute no faster than one process."""

    def start_here(spec: TorchSpec, where: torch.device) -> StageLeader:
        return start_on([str(where)] * (count - 1), spec)

    divided = load_runner(
        TorchSpec(directory, dtype="bfloat16", num_blocks=NUM_BLOCKS, device="cuda", pipeline_parallel=count),
        start_stages=start_here,
    )
    print(f"stages: {divided.model.compute_paths[-1].runs}; bit-exact: {divided.model.bit_exact}")
    for turn in range(2):
        for name, runner in (("one process", alone), (f"{count} stages", divided)):
            for tokens in PROMPTS:
                seconds = min(prompt_seconds(runner, tokens, repeats=4))
                print(f"turn {turn}: prefill {tokens}, {name}: {seconds * 1e3:.1f} ms at best", flush=True)
            _decode(runner, f"turn {turn}, {name}", (1, 16, 64))
    divided.close()


def _decode(runner: TorchModelRunner, name: str, batches: Sequence[int]) -> None:
    for batch in batches:
        params = SamplingParams(temperature=0.0, max_tokens=40)
        steps = decode_steps(runner, batch, CONTEXT, params, steps=20, limit_s=60)
        print(
            f"decode {batch} {name}: {batch / steps.ms * 1e3:.0f} tokens/s, {steps.ms:.2f} ms a step "
            f"[{steps.quantile_ms(0.1):.2f}, {steps.quantile_ms(0.9):.2f}]",
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
    alone = AttentionCall(
        query, cache, starts, lengths.to(device), tables.to(device), AttentionFeatures(HEAD_DIM**-0.5)
    )
    times, results = [], []
    for places in (None, sharing):
        work = StepWork(starts.cpu().numpy(), lengths.numpy(), device, places)

        def attend(work: StepWork = work) -> torch.Tensor:
            for _ in range(CALLS):
                out = triton_attention(replace(alone, work=work))
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
    together = set(operations._attention._together)
    medians, outputs = [], []
    for kinds in (set(), together):
        operations._attention._together = kinds
        driver = RunnerDriver(runner)
        prefix = some_tokens(0, SHARED, LLAMA_1B.vocab)
        blocks: Sequence[int] = ()
        for number in range(batch):
            tail = some_tokens(number, OWN, LLAMA_1B.vocab)
            params = SamplingParams(temperature=0.0, max_tokens=40)
            start = SHARED if blocks else 0
            request = driver.add(str(number), [*prefix, *tail], params, num_computed=start, shared=blocks)
            driver.step({str(number): SHARED + OWN - start})
            blocks = request.block_ids[: SHARED // runner.layout.block_size]
        step = {str(number): 1 for number in range(batch)}
        medians.append(median([timed_step(driver, step) for _ in range(24)][4:]) * 1e3)
        outputs.append([request.output for request in driver.requests.values()])
    print(
        f"decode {batch} with {SHARED} tokens shared and {OWN} not: {medians[0]:.2f} ms a step, together "
        f"{medians[1]:.2f} ms, ratio {medians[1] / medians[0]:.2f}, tokens "
        f"{'equal' if outputs[0] == outputs[1] else 'DIFFER'}",
        flush=True,
    )


if __name__ == "__main__":
    main()
