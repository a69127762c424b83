"""The interface over which ranks exchange what they have computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from baton.runner.backends.cpu.kernels.huge_pages import zeros_for_reading
from baton.runner.parts import Shard


class Ranks(Protocol):
    """One rank's view of all ranks. All ranks call the same methods in the same order, each from one thread.

    Nothing is summed across ranks, so that a result has the same bits with any number of them. Methods raise RankLost
    once a rank has ended.
    """

    @property
    def shard(self) -> Shard:
        """The part of this rank."""
        ...

    def gather(self, own: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """The columns of all ranks side by side: `own` [M, widths[rank]] to [M, sum of widths]."""
        ...

    def merge_rows(self, own: torch.Tensor, places: torch.Tensor, num_rows: int) -> torch.Tensor:
        """The rows of all ranks: `own` [R, K] belong to the places [R] of the result [num_rows, K].

        Each place is one rank's.
        """
        ...

    def cache_memory(self, num_bytes: int) -> torch.Tensor:
        """Memory for the KV cache, zeros: uint8 [num_bytes], the same memory for all ranks."""
        ...


class OneRank:
    """The only rank of a model that one process computes alone."""

    shard = Shard()

    def gather(self, own: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        return own

    def merge_rows(self, own: torch.Tensor, places: torch.Tensor, num_rows: int) -> torch.Tensor:
        merged = own.new_empty(num_rows, own.shape[1])
        merged[places] = own
        return merged

    def cache_memory(self, num_bytes: int) -> torch.Tensor:
        # Written once, since the first prompts would be 5 % slower if they had to wait for the system to map pages.
        return zeros_for_reading(num_bytes, torch.uint8).zero_()


ONE_RANK = OneRank()
