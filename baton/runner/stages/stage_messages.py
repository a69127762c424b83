"""What stages tell each other in frames as JSON: figures of a process, and the copies of a step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from baton.engine.batch import BlockCopy, SchedulerOutput
from baton.messages.node_report import RankReport

_MOST = 1 << 62


def figures_to_json(reports: Sequence[RankReport]) -> bytes:
    """What a stage says of the processes of its ranks, in order."""
    return json.dumps([asdict(report) for report in reports]).encode()


def figures_from_json(text: bytes | bytearray, ranks: range, host: str) -> list[RankReport]:
    """The reports that `figures_to_json` wrote, of these ranks on that host. Raises ValueError."""
    try:
        read = json.loads(text)
        if not isinstance(read, list) or not 1 <= len(read) <= len(ranks):
            raise ValueError(f"it sent no list of figures of at most {len(ranks)} processes")
        return [_figures_of(fields, rank, host) for fields, rank in zip(read, ranks, strict=False)]
    except (TypeError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"it sent something else than figures ({error})") from error


def _figures_of(fields: dict[str, Any], rank: int, host: str) -> RankReport:
    read = RankReport(**fields)
    counts = (read.pid, read.resident_bytes, read.shared_bytes, read.num_threads)
    if not all(isinstance(count, int) and 0 <= count < _MOST for count in counts):
        raise ValueError(f"its figures are {counts}")
    return replace(read, rank=rank, is_up=bool(read.is_up), cpu_s=min(float(read.cpu_s), _MOST), host=host)


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
