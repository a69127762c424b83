"""Which part of a model a process computes: the layers of a stage, and of these the shard of a rank.

Needs no torch: the process of a rank reads its specification before it imports anything slow.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.errors import ConfigError

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


@dataclass(frozen=True, slots=True)
class Stage:
    """One of `count` stages, each of which has consecutive layers; by default the only one."""

    index: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        """Whether it has the embedding."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether it has the head."""
        return self.index == self.count - 1

    def layers(self, num_layers: int, inseparable: int = 1) -> range:
        """The indices of its layers; the first stages have what is left over. Raises ConfigError for too few layers.

        The last stage has the head besides, so it is not among those with one layer more. `inseparable`: so many layers
        at the end must be in one stage, which is the last one.
        """
        most = num_layers - inseparable + 1
        if most < self.count:
            raise ConfigError(
                f"{num_layers} layers, of which the last {inseparable} must be together, can't be divided among "
                f"{self.count} stages; at most {most} would do"
                if inseparable > 1
                else f"{num_layers} layers can't be divided among {self.count} stages; at most {most} would do"
            )
        before = num_layers - max(inseparable, num_layers // self.count)
        if self.is_last:
            return range(before if self.count > 1 else 0, num_layers)
        least, more = divmod(before, self.count - 1)
        first = self.index * least + min(self.index, more)
        return range(first, first + least + (self.index < more))


def divided(total: int, count: int) -> list[int]:
    """A number, of threads, say, divided into `count` shares of at least one; the first ones have what is left over."""
    least, more = divmod(total, count)
    return [max(1, least + (index < more)) for index in range(count)]
