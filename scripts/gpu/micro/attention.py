"""Attention of one layer by the kernels of a runner, on caches in which a block has all layers, as a runner's have."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch.nn import functional

from baton.engine.runner import KVLayout
from baton.runner.backends.attention_call import AttentionCall, AttentionFeatures
from baton.runner.backends.attention_work.step_work import StepWork
from baton.runner.backends.ranks.ranks import ONE_RANK
from baton.runner.model.attention import cache_views
from gpu.made_model import BLOCK_SIZE, DTYPES
from gpu.room import device_of, has_room
from gpu.shapes import LLAMA_1B, LLAMA_8B, TINY, Shape, fill_by_counter
from gpu.stage import StageContext

_SECONDS = 3.0
"""More than any one case takes."""


@dataclass(frozen=True, slots=True)
class Case:
    """The keys of each sequence of a step. `of_prompts`: as many queries as keys; otherwise one query each."""

    name: str
    lengths: tuple[int, ...]
    of_prompts: bool = False
    is_alone: bool = False
    """Whether a block has one layer only, for comparison."""

    @property
    def queries(self) -> tuple[int, ...]:
        return self.lengths if self.of_prompts else (1,) * len(self.lengths)


_RAGGED = tuple(16 + (4096 - 16) * index // 63 for index in range(64))
_FULL = (
    Case("1 x 512", (512,)),
    Case("1 x 4,096", (4096,)),
    Case("1 x 32,768", (32768,)),
    Case("64 x 512", (512,) * 64),
    Case("128 x 512", (512,) * 128),
    Case("128 x 512, blocks of one layer", (512,) * 128, is_alone=True),
    Case("128 x 2,048", (2048,) * 128),
    Case("64 x 16 to 4,096", _RAGGED),
    Case("1 x 32,768 and 63 x 512", (32768, *(512,) * 63)),
    Case("prompt of 2,048", (2048,), of_prompts=True),
    Case("prompt of 8,192", (8192,), of_prompts=True),
    Case("prompt of 8,192, blocks of one layer", (8192,), of_prompts=True, is_alone=True),
    Case("prompt of 32,768", (32768,), of_prompts=True),
)
_SMALL = (
    Case("2 x 40", (40, 40)),
    Case("2 x 40, blocks of one layer", (40, 40), is_alone=True),
    Case("3 x 1 to 33", (1, 17, 33)),
    Case("prompt of 20", (20,), of_prompts=True),
)


def measure(context: StageContext) -> None:
    """Report every case for every shape of heads."""
    for shape in (TINY,) if context.tiny else (LLAMA_1B, LLAMA_8B):
        for case in _SMALL if context.tiny else _FULL:
            _attend(context, shape, case)


def _attend(context: StageContext, shape: Shape, case: Case) -> None:
    # Triton is there only where torch was built for GPUs.
    from baton.runner.backends.cuda.triton_attention import triton_attention

    device = device_of(context)
    dtype = DTYPES[device.type]
    layers = 1 if case.is_alone else shape.layers
    layout = KVLayout.uniform(BLOCK_SIZE, layers, shape.kv_heads, shape.head_dim, str(dtype).removeprefix("torch."))
    widths = [-(-length // BLOCK_SIZE) for length in case.lengths]
    num_blocks, rows = 1 + sum(widths), sum(case.queries)
    row_bytes = shape.heads * shape.head_dim * dtype.itemsize
    num_bytes = num_blocks * layout.block_bytes + 8 * rows * row_bytes
    name = f"attention {shape.name} {case.name}"
    if not has_room(context, name, num_bytes=num_bytes, seconds=_SECONDS):
        return
    memory = torch.empty(num_blocks * layout.block_elements, dtype=dtype, device=device)
    fill_by_counter(memory, "cache", deviation=1.0)
    query = torch.empty(rows, shape.heads, shape.head_dim, dtype=dtype, device=device)
    fill_by_counter(query, "query", deviation=1.0)
    # The last layer's blocks are read in random order, as a pool hands them out after a while.
    *_, cache = cache_views(memory, layout, ONE_RANK.shard).values()
    order = 1 + torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(0)).to(torch.int32)
    tables = torch.zeros(len(widths), max(widths), dtype=torch.int32)
    for row, blocks in enumerate(torch.split(order, widths)):
        tables[row, : blocks.numel()] = blocks
    starts = torch.tensor([0, *itertools.accumulate(case.queries)], dtype=torch.int32, device=device)
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=device)
    work = StepWork(starts.cpu().numpy(), lengths.cpu().numpy(), device)
    how = AttentionFeatures(shape.head_dim**-0.5)
    call = AttentionCall(query, cache, starts, lengths, tables.to(device), how, work=work)
    timing = context.time(lambda: triton_attention(call), repeats=9, warm_up=1, graph=True, cold=True)
    read = 1e-9 * dtype.itemsize * sum(case.lengths) * 2 * shape.kv_heads * shape.head_dim
    teraflop = 4e-12 * shape.heads * shape.head_dim * sum(n * n / 2 if case.of_prompts else n for n in case.lengths)
    fields = {"gb_per_s": read / timing.ms * 1e3, "tflops": teraflop / timing.ms * 1e3}
    if case.of_prompts:
        del memory, cache, call
        fields |= _by_torch(context, shape, case, query, teraflop)
    context.report("attention", shape=shape.name, case=case.name, us=timing.ms * 1e3, **fields)


def _by_torch(
    context: StageContext, shape: Shape, case: Case, query: torch.Tensor, teraflop: float
) -> dict[str, float]:
    """What torch's own attention takes for a prompt whose keys and values lie beside each other."""
    keys, values = (
        torch.empty(1, shape.kv_heads, case.lengths[0], shape.head_dim, dtype=query.dtype, device=query.device)
        for _ in range(2)
    )
    for name, tensor in (("keys", keys), ("values", values)):
        fill_by_counter(tensor, name, deviation=1.0)
    heads = query.transpose(0, 1)[None].contiguous()
    timing = context.time(
        lambda: functional.scaled_dot_product_attention(heads, keys, values, is_causal=True, enable_gqa=True),
        repeats=9,
        graph=True,
        cold=True,
    )
    return {"sdpa_us": timing.ms * 1e3, "sdpa_tflops": teraflop / timing.ms * 1e3}
