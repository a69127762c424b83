"""What the leading stage tells another one to load, figures of its process, and the copies of a step, as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from baton.engine.batch import BlockCopy, SchedulerOutput
from baton.messages.node_report import RankReport
from baton.runner.parts import Stage
from baton.runner.spec import CacheSpec

PROTOCOL = 1
"""Version of the frames between stages, and of the messages and digests of their movers. All stages of a model must
have the same, so it is raised when any of them changes."""

_MOST = 1 << 62


@dataclass(frozen=True, slots=True)
class StageSpec:
    """What a stage loads from its own copy of the model, and how it computes."""

    index: int
    count: int
    fingerprint: str
    """The model's, which every stage checks: other weights would give other tokens without anybody noticing."""
    dtype: str
    block_size: int
    cache: CacheSpec
    """The cache of each stage."""
    host_cache_bytes: int
    """The host tier of each stage."""
    torch_threads: int
    """Torch's own threads, for which all stages pad rows."""
    quantization: Literal["int8", "int4"] | None = None
    dequantize: bool = False
    protocol: int = PROTOCOL

    @property
    def stage(self) -> Stage:
        return Stage(self.index, self.count)

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, text: bytes | bytearray) -> StageSpec:
        """The specification that `to_json` wrote. Raises ValueError."""
        read = _object(text)
        if read.get("protocol") != PROTOCOL:
            raise ValueError(f"the leader speaks version {read.get('protocol')}, and this one {PROTOCOL}")
        try:
            return cls(**{**read, "cache": CacheSpec(**read["cache"])})
        except (TypeError, KeyError) as error:
            raise ValueError(f"the leader sent something else than what to load ({error})") from error


def figures_to_json(report: RankReport) -> bytes:
    """What a stage says of its process."""
    return json.dumps(asdict(report)).encode()


def figures_from_json(text: bytes | bytearray, rank: int, host: str) -> RankReport:
    """The report that `figures_to_json` wrote, of the rank on that host. Raises ValueError."""
    try:
        read = RankReport(**_object(text))
        counts = (read.pid, read.resident_bytes, read.shared_bytes, read.num_threads)
        if not all(isinstance(count, int) and 0 <= count < _MOST for count in counts):
            raise ValueError(f"its figures are {counts}")
        return replace(read, rank=rank, is_up=bool(read.is_up), cpu_s=min(float(read.cpu_s), _MOST), host=host)
    except (TypeError, ArithmeticError) as error:
        raise ValueError(f"it sent something else than figures ({error})") from error


@dataclass(frozen=True, slots=True)
class StepCopies:
    """The blocks that a step copies before it computes, of which every stage has its layers."""

    blocks_to_swap_out: Sequence[BlockCopy] = ()
    blocks_to_swap_in: Sequence[BlockCopy] = ()
    blocks_to_copy: Sequence[BlockCopy] = ()

    @classmethod
    def of(cls, decided: SchedulerOutput) -> StepCopies:
        """The copies of a step."""
        return cls(decided.blocks_to_swap_out, decided.blocks_to_swap_in, decided.blocks_to_copy)

    def __bool__(self) -> bool:
        return bool(self.blocks_to_swap_out or self.blocks_to_swap_in or self.blocks_to_copy)

    def to_json(self) -> bytes:
        lists = (self.blocks_to_swap_out, self.blocks_to_swap_in, self.blocks_to_copy)
        return json.dumps([[(copy.source, copy.destination) for copy in copies] for copies in lists]).encode()

    @classmethod
    def from_json(cls, text: bytes | bytearray) -> StepCopies:
        """The copies that `to_json` wrote."""
        return cls(*([BlockCopy(source, destination) for source, destination in pairs] for pairs in json.loads(text)))


def _object(text: bytes | bytearray) -> dict[str, Any]:
    read = json.loads(text)
    if not isinstance(read, dict):
        raise ValueError("it sent no JSON object")
    return read
