"""What a rank is made of, the first one and those behind it alike."""

from __future__ import annotations

from baton.errors import ConfigError
from baton.runner.backends.cpu.kernel_file import why_slow
from baton.runner.backends.cpu.kernels.barrier import Barrier
from baton.runner.backends.kernel_choice import CompiledOperations, choose_operations
from baton.runner.backends.ranks.host_ranks import HostRanks, SharedMemory
from baton.runner.backends.sharded_operations import ShardedOperations
from baton.runner.ranks.group_files import RankFiles
from baton.runner.ranks.host_stages import HostStages
from baton.runner.ranks.micro_batch_slot import SlotsInTurns
from baton.runner.ranks.rank_spec import RankSpec


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
