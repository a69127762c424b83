"""What the host does for a GPU: digests of blocks in VRAM."""

from __future__ import annotations

import time
from statistics import median

import torch

from baton.engine.runner import KVLayout, KVMemory
from baton.runner.blocks.block_digests import block_digests
from gpu.made_model import BLOCK_SIZE, DTYPES
from gpu.room import device_of, has_room
from gpu.shapes import LLAMA_1B, TINY, fill_by_counter
from gpu.stage import StageContext


def measure_digests(context: StageContext) -> None:
    """Report bytes a second of digests of blocks in VRAM: by the kernel on a GPU, by copies elsewhere."""
    shape, num_blocks = (TINY, 8) if context.tiny else (LLAMA_1B, 1024)
    device = device_of(context)
    dtype = DTYPES[device.type]
    name = str(dtype).removeprefix("torch.")
    layout = KVLayout.uniform(BLOCK_SIZE, shape.layers, shape.kv_heads, shape.head_dim, name)
    if not has_room(context, "digests", num_bytes=num_blocks * layout.block_bytes, seconds=3):
        return
    owner = torch.empty(num_blocks * layout.block_elements, dtype=dtype, device=device)
    fill_by_counter(owner, "cache", deviation=1.0)
    # VRAM also on a CPU, so that the blocks take the same way there.
    memory = KVMemory(owner.data_ptr(), num_blocks, layout.block_bytes, "VRAM", device.index or 0, owner, layout=layout)
    digests = block_digests(memory)
    for asked in sorted({1, num_blocks // 4, num_blocks}):
        ids = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0))[:asked].tolist()
        seconds = seconds_of(context, lambda ids=ids: digests(ids))
        size = asked * layout.block_bytes
        context.report("digests", blocks=asked, bytes=size, ms=seconds * 1e3, gb_per_s=size / seconds / 1e9)
    alone = digests([0, 1])
    context.check("digests don't depend on their mates", digests([1, 0]) == [alone[1], alone[0]])


def seconds_of(context: StageContext, call: object) -> float:
    """The median of a few calls of what the host does, which ends when the call returns."""
    assert callable(call)
    call()
    taken = []
    for _ in range(2 if context.tiny else 5):
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
    return median(taken)
