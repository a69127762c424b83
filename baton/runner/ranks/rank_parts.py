"""What a rank is made of, the first one and those behind it alike, and its view of the stages of its host."""

from __future__ import annotations

from baton.errors import ConfigError
from baton.runner.backends.cpu.kernel_file import why_slow
from baton.runner.backends.cpu.kernels.barrier import Barrier, BarrierTag
from baton.runner.backends.kernel_choice import CompiledOperations, choose_operations
from baton.runner.backends.ranks.host_ranks import HostRanks, SharedMemory
from baton.runner.backends.sharded_operations import ShardedOperations
from baton.runner.model.stage import StageReport
from baton.runner.parts import Stage
from baton.runner.ranks.group_files import RankFiles
from baton.runner.ranks.micro_batch_slot import SlotsInTurns
from baton.runner.ranks.rank_spec import RankSpec

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


class RankParts:
    """The parts of one rank: its place, its operations, and its view of the other ranks of its stage and of all."""

    def __init__(self, spec: RankSpec, rank: int, files: RankFiles) -> None:
        """Raises ConfigError where the C kernels can't be used."""
        self.stage = spec.stage_of(rank)
        self.shard = spec.shard_of(rank)
        self.ranks = HostRanks(self.shard, files.stage, makes_cache=rank == 0)
        self.barrier_of_all = Barrier(SharedMemory(files.control), spec.size)
        self.stages = HostStages(self.stage, files.reports, self.barrier_of_all, writes=self.shard.rank == 0)
        self.operations = _operations(spec.threads_of(rank), self.ranks)
        self.slots = SlotsInTurns(files.slots)


def _operations(num_threads: int, ranks: HostRanks) -> ShardedOperations | CompiledOperations:
    operations = choose_operations(num_threads)
    if not isinstance(operations, CompiledOperations):
        raise ConfigError(
            "a model can be divided among ranks only with Baton's own kernels, which can't be used here "
            f"({why_slow()}); leave --tp and --pp out"
        )
    if ranks.shard.size == 1:
        return CompiledOperations(num_threads, operations.numerics(), ranks)
    return ShardedOperations(operations, ranks)
