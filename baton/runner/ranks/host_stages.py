"""Stages on one host, which exchange what they have found out while they load."""

from __future__ import annotations

from baton.errors import ConfigError
from baton.runner.backends.cpu.kernels.barrier import Barrier, BarrierTag
from baton.runner.backends.ranks.host_ranks import SharedMemory
from baton.runner.model.stage import Stage, StageReport

_REPORT_BYTES = 1 << 20
"""The most bytes of a stage's report: a layer takes less than 150."""
_LENGTH_BYTES = 8


class HostStages:
    """One rank's view of the stages of its host (`Stages`), which share one cache."""

    has_own_cache = False

    def __init__(self, stage: Stage, reports: int, barrier: Barrier, *, writes: bool) -> None:
        """`reports`: descriptor of shared memory; `barrier`: of all ranks; `writes`: for one rank of each stage."""
        self.stage = stage
        self._memory = SharedMemory(reports)
        self._barrier = barrier
        self._writes = writes

    def exchange(self, own: StageReport) -> list[StageReport]:
        memory = self._memory.exactly(self.stage.count * _REPORT_BYTES).numpy()
        if self._writes:
            text = own.to_json()
            if len(text) + _LENGTH_BYTES > _REPORT_BYTES:
                raise ConfigError(f"a model with so many layers can't be divided in stages ({len(text)} bytes)")
            start = self.stage.index * _REPORT_BYTES
            written = len(text).to_bytes(_LENGTH_BYTES, "little") + text
            memory[start : start + len(written)].data[:] = written
        self._barrier.wait(BarrierTag.REPORTS)
        return [_read(memory[index * _REPORT_BYTES :].data) for index in range(self.stage.count)]


def _read(memory: memoryview) -> StageReport:
    length = int.from_bytes(memory[:_LENGTH_BYTES], "little")
    return StageReport.from_json(bytes(memory[_LENGTH_BYTES : _LENGTH_BYTES + length]))
