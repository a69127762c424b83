"""What the first rank and the process of another one tell each other: what every rank loads, and over their channel
heartbeats one way, and its end both ways.

Needs no torch: a new process sends its first heartbeat before it imports anything slow.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from dataclasses import asdict, dataclass
from typing import Literal

from baton.runner.parts import Shard, Stage
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


LOADING = b"\0"
LOADED = b"\1"
"""The heartbeat while the model is loading, and the one afterwards: a loading process may be silent for longer."""
INTERVAL_S = 0.5
"""Seconds between two heartbeats."""


class Heartbeats:
    """Sends heartbeats from a thread of its own, and ends this process as soon as the first rank's has ended."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._heartbeat = LOADING
        threading.Thread(target=self._send, name="first-rank-watch", daemon=True).start()

    def loaded(self) -> None:
        """Say now, and from now on, that the model is loaded."""
        self._heartbeat = LOADED
        self._channel.sendall(LOADED)

    def _send(self) -> None:
        self._channel.settimeout(INTERVAL_S)
        while True:
            try:
                self._channel.sendall(self._heartbeat)
                ended = not self._channel.recv(1)
            except TimeoutError:
                continue
            except OSError:
                ended = True
            if ended:
                # Not sys.exit: the main thread may wait in a kernel, and nothing here is worth an orderly end.
                os._exit(0)
