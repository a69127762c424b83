"""Which part of a model each rank computes, and the interface over which ranks exchange what they have computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from baton.errors import ConfigError
from baton.runner.backends.cpu.kernels.huge_pages import zeros_for_reading

_COLUMNS = 64
"""Columns are given out in groups of this many, as the kernels pack them, as long as every rank has a group."""


@dataclass(frozen=True, slots=True)
class OwnHeads:
    """A rank's own query heads, and the key/value heads that they attend to."""

    queries: range
    kv: range


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of one rank among `size` ranks."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} is not one of {self.size} ranks")

    def columns(self, num_columns: int) -> range:
        """The columns of a product that this rank computes."""
        return columns_of_ranks(num_columns, self.size)[self.rank]

    def heads(self, num_heads: int, num_kv_heads: int) -> OwnHeads:
        """The attention heads that this rank computes; several ranks share a key/value head where there are too few.

        Raises ConfigError for numbers of heads that can't be divided among so many ranks.
        """
        if not divides_heads(self.size, num_heads, num_kv_heads):
            possible = [str(n) for n in range(1, num_heads + 1) if divides_heads(n, num_heads, num_kv_heads)]
            raise ConfigError(
                f"{num_heads} attention heads over {num_kv_heads} key/value heads can't be divided among {self.size} "
                f"ranks; {', '.join(possible)} would do"
            )
        num_queries = num_heads // self.size
        return OwnHeads(range(self.rank * num_queries, (self.rank + 1) * num_queries), self.kv_heads(num_kv_heads))

    def kv_heads(self, num_kv_heads: int) -> range:
        """This rank's key/value heads."""
        first = self.rank * num_kv_heads // self.size
        return range(first, first + max(1, num_kv_heads // self.size))


def columns_of_ranks(num_columns: int, size: int) -> list[range]:
    """The columns of each of `size` ranks; a rank may have none."""
    unit = _COLUMNS if num_columns >= _COLUMNS * size else 1
    groups = -(-num_columns // unit)
    ends = [min(num_columns, groups * (rank + 1) // size * unit) for rank in range(size)]
    return list(map(range, [0, *ends[:-1]], ends))


def divides_heads(size: int, num_heads: int, num_kv_heads: int) -> bool:
    """Whether all of `size` ranks get equally many query heads, of equally many whole key/value heads."""
    return num_heads % size == 0 and (num_kv_heads % size == 0 or size % num_kv_heads == 0)


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
        """Memory for the KV cache, zeros: uint8 [num_bytes], the same memory for all ranks of a host."""
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
