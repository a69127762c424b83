"""The ranks of a stage: the first one, which starts and leads the others, and one behind it.

The first one announces what it computes, so that all ranks compute it together. The KV cache of the stage is one memory
of all its ranks, so the first one alone copies blocks and moves them, while none computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from baton.engine.batch import SchedulerOutput
from baton.engine.runner import RemotePart
from baton.errors import ConfigError
from baton.messages.node_report import RankReport
from baton.observe.rank_reports import rank_reports
from baton.runner.adapters.in_parts import AdaptersInParts
from baton.runner.adapters.model_adapters import ModelAdapters
from baton.runner.backends.cpu.kernel_file import why_slow
from baton.runner.backends.cpu.kernels.barrier import BarrierTag, share_processors
from baton.runner.backends.cpu.kernels.errors import RankLost
from baton.runner.backends.device import CPU
from baton.runner.backends.kernel_choice import CompiledOperations, choose_operations
from baton.runner.backends.operations import Operations
from baton.runner.backends.ranks.host_ranks import HostRanks, SharedFiles
from baton.runner.backends.sharded_operations import ShardedOperations
from baton.runner.execution.input_batch import FlatBatch
from baton.runner.model.decoder import ModelOutput
from baton.runner.model.stage import ONE_STAGE, StageReport, Stages
from baton.runner.model.transformer import Transformer
from baton.runner.model.weights import LoadedModel, load_model_for
from baton.runner.ranks.micro_batch import MicroBatch
from baton.runner.ranks.rank_group import RankGroup
from baton.runner.ranks.rank_leader import FollowingRanks
from baton.runner.ranks.step_slot import StepSlot
from baton.runner.shared_by_loaders import prepare
from baton.runner.spec import WeightSpec
from baton.runner.stage_spec import StageSpec

StartRanks = Callable[[StageSpec, SharedFiles, Callable[[], None]], FollowingRanks]
"""Starts the ranks behind the first one; the function makes all waiting ranks end."""


def divided_operations(num_threads: int) -> CompiledOperations:
    """The operations of a process that computes a model with others of this host, which must have equal numerics.

    Raises ConfigError where the C kernels can't be used.
    """
    operations = choose_operations(num_threads)
    if not isinstance(operations, CompiledOperations):
        raise ConfigError(
            "a model can be divided among ranks only with Baton's own kernels, which can't be used here "
            f"({why_slow()}); leave --tp and --pp out"
        )
    return operations


class _RankParts:
    """What the first rank and those behind it are made of."""

    def __init__(self, spec: StageSpec, rank: int, files: SharedFiles) -> None:
        share_processors(spec.num_ranks_here)
        self.ranks = HostRanks(spec.shard_of(rank), files, makes_cache=rank == 0)
        self.barrier = self.ranks.barrier
        self.operations = ShardedOperations(divided_operations(spec.threads_of(rank)), self.ranks)
        self.slot = StepSlot(files.step)


class FirstRank:
    """The first rank of a stage, and the others in its hands until `close`. Its view of all stages is the others', too
    (`Stages`)."""

    def __init__(self, spec: StageSpec, stages: Stages = ONE_STAGE, start_ranks: StartRanks = RankGroup) -> None:
        """Start the other ranks. Raises ConfigError where no ranks can compute."""
        self.stage = spec.stage
        self._spec = spec
        self._stages = stages
        self._files = SharedFiles.make()
        self._is_closed = False
        try:
            self._parts = _RankParts(spec, 0, self._files)
            self.followers = start_ranks(spec, self._files, self._parts.barrier.abort)
        except BaseException:
            self._files.close()
            raise

    @property
    def operations(self) -> Operations:
        """The operations of this rank."""
        return self._parts.operations

    def exchange(self, own: StageReport) -> list[StageReport]:
        """The reports of all stages, which the other ranks get, too."""
        reports = self._stages.exchange(own)
        self._parts.slot.write_reports(reports)
        self._parts.barrier.wait(BarrierTag.REPORTS)
        # All have read them before a step is written in their place.
        self._parts.barrier.wait(BarrierTag.DONE)
        return reports

    @contextmanager
    def computing(self, micro: MicroBatch, received: torch.Tensor | None) -> Iterator[None]:
        """Let the other ranks compute what the body computes; if it fails, all are lost. Raises RankLost.

        `received`: the rows [T, hidden size] of the stage before.
        """
        parts = self._parts
        try:
            parts.slot.write(micro, received)
            parts.barrier.wait(BarrierTag.STEP)
            yield
            parts.barrier.wait(BarrierTag.DONE)
            parts.ranks.trim()
        except BaseException as error:
            # The other ranks are in the middle of the step, and would take the next one's numbers for this one's.
            self.followers.declare_lost(f"the first rank failed in a step: {error!r}")
            if isinstance(error, Exception):
                raise RankLost(f"the step can't be computed: {self.followers.why_lost or repr(error)}") from error
            raise

    @property
    def remote_parts(self) -> Sequence[RemotePart]:
        return ()

    def rank_reports(self) -> Sequence[RankReport]:
        return rank_reports(self.followers.pids)

    def adapters_of(self, own: ModelAdapters) -> AdaptersInParts:
        return AdaptersInParts(own, ranks=self.followers.adapter_parts)

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
            self._files.close()


class LeadingTransformer(Transformer):
    """A stage's part of the model in the process that leads the stage, and the KV cache of all its ranks."""

    def __init__(
        self,
        model: LoadedModel,
        operations: Operations,
        spec: StageSpec,
        stages: Stages,
        first_rank: FirstRank | None = None,
    ) -> None:
        """`first_rank`: leads the stage's other ranks, whose view of the stages is `stages`; None: there are none.

        Raises RankLost if another rank or stage does not load its part at the same time.
        """
        self._first_rank = first_rank
        operations = operations if first_rank is None else first_rank.operations
        try:
            super().__init__(model, operations, spec.block_size, spec.cache, spec.torch_threads, first_rank or stages)
        except RankLost as error:
            why_lost = "" if first_rank is None else first_rank.followers.why_lost
            raise RankLost(why_lost or str(error)) from error

    def _compute(
        self,
        batch: FlatBatch,
        logits_rows: npt.NDArray[np.int64],
        sampling: bool,
        received: torch.Tensor | None = None,
        num_logits: int | None = None,
    ) -> ModelOutput:
        if self._first_rank is None:
            return super()._compute(batch, logits_rows, sampling, received, num_logits)
        # All ranks compute the logits of all rows that are wanted: the others are not told of fewer.
        with self._first_rank.computing(MicroBatch(batch, None if sampling else logits_rows), received):
            return super()._compute(batch, logits_rows, sampling, received)


class FollowingRank:
    """One rank behind the first one of its stage. `load`, then `follow`, in one thread."""

    def __init__(self, spec: StageSpec, rank: int, files: SharedFiles) -> None:
        self.stage = spec.stage
        self._spec = spec
        self._parts = _RankParts(spec, rank, files)
        self._model: LoadedModel | None = None

    def exchange(self, own: StageReport) -> list[StageReport]:
        """The reports of all stages, from the first rank."""
        self._parts.barrier.wait(BarrierTag.REPORTS)
        reports = self._parts.slot.read_reports()
        self._parts.barrier.wait(BarrierTag.DONE)
        return reports

    def load(self) -> None:
        """Read the model's configuration, and map its weights. Raises ConfigError."""
        spec = self._spec
        prepare(spec.torch_threads)
        how = WeightSpec(spec.dtype, spec.quantization, spec.dequantize, in_parts=True)
        self._model = load_model_for(self._parts.operations, Path(spec.model_dir), how, CPU)

    def follow(self, on_loaded: Callable[[ModelAdapters], None]) -> None:
        """Compute what the first rank announces until a rank is lost; raises RankLost then.

        `on_loaded` is called once the weights are packed, with this rank's part of the model's adapters.
        """
        if self._model is None:
            raise RuntimeError("the model is not loaded")
        spec, parts = self._spec, self._parts
        transformer = Transformer(self._model, parts.operations, spec.block_size, spec.cache, spec.torch_threads, self)
        self._model = None
        on_loaded(transformer.adapters)
        while True:
            parts.barrier.wait(BarrierTag.STEP)
            micro = parts.slot.read()
            received = None
            if not self.stage.is_first:
                received = parts.slot.received(
                    micro.batch.token_ids.size, transformer.sent_width, transformer.sent_dtype
                )
            transformer.compute_stage(micro.batch, micro.logits_rows, received)
            parts.barrier.wait(BarrierTag.DONE)
