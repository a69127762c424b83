"""What every rank of a model loads, as it is told to its process."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal

from baton.runner.backends.ranks.ranks import Shard
from baton.runner.model.stage import Stage
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
    tensor_parallel: int
    """Number of ranks in each stage."""
    pipeline_parallel: int = 1
    """Number of stages."""
    quantization: Literal["int8", "int4"] | None = None
    dequantize: bool = False

    @property
    def size(self) -> int:
        """Number of all ranks."""
        return self.tensor_parallel * self.pipeline_parallel

    def stage_of(self, rank: int) -> Stage:
        """The stage of a rank: ranks are numbered stage by stage."""
        return Stage(rank // self.tensor_parallel, self.pipeline_parallel)

    def shard_of(self, rank: int) -> Shard:
        """The part of a rank in its stage."""
        return Shard(rank % self.tensor_parallel, self.tensor_parallel)

    def check_divides(self, num_layers: int, num_heads: int, num_kv_heads: int) -> None:
        """Raise ConfigError unless every stage gets layers, and every rank of a stage equally many heads."""
        self.stage_of(0).layers(num_layers)
        self.shard_of(0).heads(num_heads, num_kv_heads)

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
