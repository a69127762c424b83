"""The rank in the process of the node: it starts the others, and leads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from baton.engine.batch import SchedulerOutput
from baton.engine.runner import RemotePart
from baton.messages.node_report import ComputePath, RankReport
from baton.observe.rank_reports import rank_reports
from baton.runner.backends.cpu.kernels.barrier import Barrier
from baton.runner.backends.ranks.host_ranks import SharedMemory
from baton.runner.model.weights import LoadedModel
from baton.runner.ranks.following_ranks import FollowingRanks
from baton.runner.ranks.group_files import GroupFiles
from baton.runner.ranks.leading_transformer import LeadingTransformer
from baton.runner.ranks.rank_group import RankGroup
from baton.runner.ranks.rank_parts import RankParts
from baton.runner.ranks.rank_spec import RankSpec
from baton.runner.ranks.stage_ring import StageRing

StartRanks = Callable[[RankSpec, GroupFiles, Callable[[], None]], FollowingRanks]
"""Starts the ranks behind the first one; the function makes all waiting ranks end."""


class FirstRank:
    """The first rank of a model, and the others in its hands until `close`."""

    def __init__(self, spec: RankSpec, start_ranks: StartRanks = RankGroup) -> None:
        """Start the other ranks. Raises ConfigError where no ranks can compute."""
        self._spec = spec
        self._files = files = GroupFiles(spec.pipeline_parallel)
        self._is_closed = False
        self._ring = StageRing(files.stages[0].receiving, files.stages[0].sending)
        try:
            self._parts = RankParts(spec, 0, files.stages[0])
            barriers = [
                self._parts.barrier_of_all,
                *(Barrier(SharedMemory(stage.stage.control), spec.tensor_parallel) for stage in files.stages),
            ]

            def abort() -> None:
                for barrier in barriers:
                    barrier.abort()
                files.cut_ring()

            self.followers = start_ranks(spec, files, abort)
        except BaseException:
            self._ring.close()
            files.close()
            raise

    @property
    def path(self) -> ComputePath:
        """What computes beside this process, for operators."""
        spec = self._spec
        slow = f"they share {spec.num_threads} threads: give the node at least {spec.size} (--threads)"
        threads = "+".join(str(spec.threads_of(rank)) for rank in range(spec.size))
        stages = f" in {spec.pipeline_parallel} stages" if spec.pipeline_parallel > 1 else ""
        return ComputePath(
            "ranks",
            f"{spec.size} processes{stages} with {threads} threads",
            slow if spec.size > spec.num_threads else "",
        )

    def transformer(self, model: LoadedModel) -> LeadingTransformer:
        """This rank's part of the model, which all ranks load at the same time. Raises RankLost if one does not."""
        return LeadingTransformer(model, self._spec, self._parts, self._ring, self.followers)

    @property
    def remote_parts(self) -> Sequence[RemotePart]:
        return ()

    def rank_reports(self) -> Sequence[RankReport]:
        return rank_reports(self.followers.pids)

    def announce_copies(self, decided: SchedulerOutput) -> None:
        """The KV cache is one memory of all ranks, in which the first one copies."""

    def await_copies(self) -> None:
        """The first rank has made them."""

    def end_ranks(self) -> None:
        """End the other ranks, and with RankLost a step that is being computed; idempotent."""
        self.followers.close()

    def close(self) -> None:
        """End the other ranks, and close what they shared; idempotent. No step may be computed now."""
        if not self._is_closed:
            self._is_closed = True
            self.end_ranks()
            self._ring.close()
            self._files.close()
