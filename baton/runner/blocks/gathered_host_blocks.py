"""The host tier of a cache on a GPU: the blocks of a step are gathered there, and neighbours cross the bus together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from baton.engine.batch import BlockCopy
from baton.runner.blocks.host_blocks import HostBlocks, Swaps

_GATHERED_BYTES = 64 << 20
"""Size of the blocks that are gathered at once: this much of the GPU's memory is needed beside the cache."""


class GatheredHostBlocks(HostBlocks):
    """`HostBlocks` of tensors, the cache on a device and the host blocks in pinned memory.

    The host tier hands out neighbours where it can, so that a step's blocks mostly are one copy in each direction.
    """

    def __init__(self, cache: torch.Tensor, blocks: torch.Tensor) -> None:
        super().__init__(cache, blocks)
        self._at_once = max(1, _GATHERED_BYTES // max(1, cache[0].nbytes))

    def execute(self, output: Swaps) -> int:
        """As of `HostBlocks`; on return all copies have been made."""
        cache, blocks = self._cache, self._blocks
        for some in self._parts(output.blocks_to_swap_out, host=1):
            gathered = cache.index_select(0, self._on_device([copy.source for copy in some]))
            for at, first, count in _runs([copy.destination for copy in some]):
                blocks[first : first + count].copy_(gathered[at : at + count], non_blocking=True)
        for some in self._parts(output.blocks_to_swap_in, host=0):
            gathered = cache.new_empty((len(some), *cache.shape[1:]))
            for at, first, count in _runs([copy.source for copy in some]):
                gathered[at : at + count].copy_(blocks[first : first + count], non_blocking=True)
            cache.index_copy_(0, self._on_device([copy.destination for copy in some]), gathered)
        num_copied = len(output.blocks_to_swap_out) + len(output.blocks_to_swap_in)
        if num_copied and cache.is_cuda:
            # The time of the copies is measured, and host blocks are handed out again after the step.
            torch.cuda.current_stream(cache.device).synchronize()
        return num_copied

    def _parts(self, copies: Sequence[BlockCopy], host: int) -> Iterator[Sequence[BlockCopy]]:
        """The copies in the order of their host blocks, the field of that index, as many at once as are gathered."""
        ordered = sorted(copies, key=lambda copy: copy[host])
        for first in range(0, len(ordered), self._at_once):
            yield ordered[first : first + self._at_once]

    def _on_device(self, ids: list[int]) -> torch.Tensor:
        return torch.tensor(ids, dtype=torch.int64).to(self._cache.device)


def _runs(ids: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """The runs of successive numbers in `ids`: where each begins there, its first number, and its length."""
    begin = 0
    for at in range(1, len(ids) + 1):
        if at == len(ids) or ids[at] != ids[at - 1] + 1:
            yield begin, ids[begin], at - begin
            begin = at
