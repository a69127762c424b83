"""What the process that leads tells those of other ranks and stages to load.

Needs no torch: a new process reads it before it imports anything slow.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal

from baton.runner.parts import Shard, Stage, divided
from baton.runner.spec import CacheSpec

PROTOCOL = 3
"""Version of the frames between stages, and of the messages and digests of their movers. All stages of a model must
have the same, so it is raised when any of them changes."""


@dataclass(frozen=True, slots=True)
class StageSpec:
    """What the ranks of a stage load, and how they compute. A model that is not divided in stages has one stage."""

    model_dir: str
    """The stage's own copy of the model: each host has one."""
    fingerprint: str
    """The model's, which every stage checks: other weights would give other tokens without anybody noticing."""
    dtype: str
    block_size: int
    cache: CacheSpec
    num_threads: int
    """Threads of the stage's ranks together."""
    torch_threads: int
    """Torch's own threads in each rank of all stages, for which all of them pad rows: they must exchange equally many
    rows."""
    tensor_parallel: int = 1
    """Number of ranks in each stage."""
    index: int = 0
    count: int = 1
    host_cache_bytes: int = 0
    """The host tier: of each stage, or of all stages together as the cache is."""
    quantization: Literal["int8", "int4"] | None = None
    dequantize: bool = False
    protocol: int = PROTOCOL

    @property
    def stage(self) -> Stage:
        """The stage."""
        return Stage(self.index, self.count)

    @property
    def num_ranks_here(self) -> int:
        """Number of ranks that share the processors of a host."""
        return self.tensor_parallel * (self.count if self.cache.is_of_all_stages else 1)

    def shard_of(self, rank: int) -> Shard:
        """The part of a rank of the stage."""
        return Shard(rank, self.tensor_parallel)

    def threads_of(self, rank: int) -> int:
        """The threads of a rank of the stage, at least one; the first ranks have what is left over."""
        return divided(self.num_threads, self.tensor_parallel)[rank]

    def number_of(self, rank: int) -> int:
        """The number of a rank of the stage among all ranks, of which those of the last stage, which leads, are the
        first."""
        return rank if self.stage.is_last else (self.index + 1) * self.tensor_parallel + rank

    def check_divides(self, num_layers: int, num_heads: int, num_kv_heads: int) -> None:
        """Raise ConfigError unless every stage gets layers, and every rank of a stage equally many heads."""
        self.stage.layers(num_layers)
        self.shard_of(0).heads(num_heads, num_kv_heads)

    def to_json(self) -> str:
        """The text that `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes | bytearray) -> StageSpec:
        """The specification that `to_json` wrote. Raises ValueError."""
        read = json.loads(text)
        if not isinstance(read, dict):
            raise ValueError("it sent no JSON object")
        if read.get("protocol") != PROTOCOL:
            raise ValueError(f"the leader speaks version {read.get('protocol')}, and this one {PROTOCOL}")
        try:
            return cls(**{**read, "cache": CacheSpec(**read["cache"])})
        except (TypeError, KeyError) as error:
            raise ValueError(f"the leader sent something else than what to load ({error})") from error
