"""What stages tell each other in frames as JSON: figures of a process, and the copies of a step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from baton.engine.batch import BlockCopy, SchedulerOutput
from baton.messages.node_report import RankReport

_MOST = 1 << 62


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
