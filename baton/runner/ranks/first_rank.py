"""The rank in the process of the node: it starts the others, and leads them."""

from __future__ import annotations

from collections.abc import Callable

from baton.messages.node_report import ComputePath
from baton.runner.backends.cpu.kernels.barrier import Barrier
from baton.runner.backends.ranks.host_ranks import HostRanks, SharedFiles
from baton.runner.backends.ranks.shard import Shard
from baton.runner.model.weights import LoadedModel
from baton.runner.ranks.following_rank import sharded_operations
from baton.runner.ranks.following_ranks import FollowingRanks
from baton.runner.ranks.leading_transformer import LeadingTransformer
from baton.runner.ranks.rank_group import RankGroup
from baton.runner.ranks.rank_spec import RankSpec
from baton.runner.ranks.step_board import StepBoard

StartRanks = Callable[[RankSpec, SharedFiles, Barrier], FollowingRanks]


class FirstRank:
    """The first rank of a model, and the others in its hands until `close`."""

    def __init__(self, spec: RankSpec, start_ranks: StartRanks = RankGroup) -> None:
        """Start the other ranks. Raises ConfigError where no ranks can compute."""
        self._spec = spec
        files = SharedFiles.make()
        try:
            ranks = HostRanks(Shard(0, spec.size), files)
            self.operations = sharded_operations(spec.threads_of(0), ranks)
            self._board = StepBoard(ranks, files)
            self.followers = start_ranks(spec, files, ranks.barrier)
        except BaseException:
            files.close()
            raise
        self._files = files
        self._is_closed = False

    @property
    def path(self) -> ComputePath:
        """What computes beside this process, for operators."""
        spec = self._spec
        slow = f"they share {spec.num_threads} threads: give the node at least {spec.size} (--threads)"
        threads = "+".join(str(spec.threads_of(rank)) for rank in range(spec.size))
        return ComputePath(
            "ranks", f"{spec.size} processes with {threads} threads", slow if spec.size > spec.num_threads else ""
        )

    def transformer(self, model: LoadedModel) -> LeadingTransformer:
        """This rank's part of the model, which all ranks load at the same time. Raises RankLost if one does not."""
        spec = self._spec
        return LeadingTransformer(
            model, self.operations, spec.block_size, spec.cache, spec.least_threads, self._board, self.followers
        )

    def close(self) -> None:
        """End the other ranks; idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self.followers.close()
            self._files.close()
