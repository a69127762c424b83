"""What every rank of a model loads, as it is told to its process."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal

from baton.runner.spec import CacheSpec


@dataclass(frozen=True, slots=True)
class RankSpec:
    """What every rank of a model loads, and how it computes."""

    model_dir: str
    dtype: str
    block_size: int
    cache: CacheSpec
    """The cache that all ranks share."""
    num_threads: int
    """Threads of all ranks together."""
    size: int
    """Number of ranks."""
    quantization: Literal["int8", "int4"] | None = None
    dequantize: bool = False

    def threads_of(self, rank: int) -> int:
        """The threads of one rank, at least one; the first ranks have what is left over."""
        return max(1, self.num_threads // self.size + (rank < self.num_threads % self.size))

    @property
    def least_threads(self) -> int:
        """The fewest threads of any rank. All ranks pad rows for it, since they must exchange equally many rows."""
        return self.threads_of(self.size - 1)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RankSpec:
        """The specification that `to_json` wrote."""
        read = json.loads(text)
        return cls(**{**read, "cache": CacheSpec(**read["cache"])})
