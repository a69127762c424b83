"""Copies single blocks of a cache on a device to the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch

from baton.engine.runner import KVMemory


def copied_to_host(memory: KVMemory) -> Callable[[Sequence[int]], KVMemory]:
    """A function that copies blocks to host memory, in the given order. Nothing may write to them meanwhile.

    The function may be called from any thread. Its copies use a CUDA stream of their own, so they don't wait for the
    step that is being computed.
    """
    cache: torch.Tensor = memory.owner
    rows = cache.view(-1).view(torch.uint8)[: memory.num_bytes].view(memory.num_blocks, memory.block_bytes)
    stream = torch.cuda.Stream(cache.device) if cache.is_cuda else None  # type: ignore[no-untyped-call]

    def copied(block_ids: Sequence[int]) -> KVMemory:
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            blocks = rows[torch.tensor(block_ids, dtype=torch.int64, device=rows.device)].cpu()
        return KVMemory(blocks.data_ptr(), len(block_ids), memory.block_bytes, "DRAM", 0, blocks)

    return copied
