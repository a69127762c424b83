"""The ranks of a model: the one in the node's process, which starts and leads the others, and one behind it.

The first one announces what it computes, so that all ranks compute it together. The KV cache is one memory of all
ranks, so the first one alone copies blocks and moves them, while none computes.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from baton.engine.batch import SchedulerOutput
from baton.engine.runner import RemotePart
from baton.messages.node_report import ComputePath, RankReport
from baton.observe.rank_reports import rank_reports
from baton.runner.backends.cpu.kernels.barrier import Barrier, BarrierTag
from baton.runner.backends.cpu.kernels.errors import RankLost
from baton.runner.backends.device import CPU
from baton.runner.backends.ranks.host_ranks import SharedMemory
from baton.runner.execution.input_batch import FlatBatch
from baton.runner.model.cached_model import on_host
from baton.runner.model.decoder import ModelOutput
from baton.runner.model.transformer import HiddenAndLogits, Transformer
from baton.runner.model.weights import LoadedModel, load_model_for
from baton.runner.ranks.group_files import GroupFiles, RankFiles, StageRing
from baton.runner.ranks.micro_batch import MicroBatch, Task
from baton.runner.ranks.micro_batch_slot import MicroBatchSlot, compute_part, results_in
from baton.runner.ranks.rank_group import RankGroup
from baton.runner.ranks.rank_leader import FollowingRanks, PipelinedTransformer
from baton.runner.ranks.rank_parts import RankParts
from baton.runner.ranks.rank_spec import RankSpec
from baton.runner.shared_by_loaders import prepare
from baton.runner.spec import WeightSpec


class LeadingTransformer(PipelinedTransformer):
    """The first rank's part of the model, and the KV cache of all ranks."""

    def __init__(
        self, model: LoadedModel, spec: RankSpec, parts: RankParts, ring: StageRing, followers: FollowingRanks
    ) -> None:
        """`ring`: the first stage's place in it; the caller closes it."""
        self._parts = parts
        self._followers = followers
        self._ring = ring
        self._begun: deque[tuple[MicroBatchSlot, MicroBatch, ModelOutput]] = deque()
        """Micro-batches that have begun and not ended: what the first stage has computed of each."""
        try:
            super().__init__(model, parts.operations, spec.block_size, spec.cache, spec.least_threads, parts.stages)
        except RankLost as error:
            raise RankLost(followers.why_lost or str(error)) from error

    @property
    def can_begin(self) -> bool:
        return len(self._begun) < len(self._parts.slots)

    def begin(self, task: Task, batch: FlatBatch, logits_rows: npt.NDArray[np.int64] | None) -> None:
        parts, micro = self._parts, MicroBatch(task, batch, logits_rows)
        with self._losing_all_on_failure():
            slot = parts.slots.next()
            slot.trim()
            slot.write(micro)
            parts.ranks.barrier.wait(BarrierTag.STEP)
            out = compute_part(self, parts.shard, slot, micro)
            parts.ranks.barrier.wait(BarrierTag.DONE)
            parts.ranks.trim()
            if self.stage.count > 1:
                self._ring.send()
            self._begun.append((slot, micro, out))

    def wait(self, other: socket.socket | None = None, timeout: float | None = None) -> bool:
        return self.stage.count == 1 or self._ring.wait(other, timeout)

    def end(self) -> HiddenAndLogits:
        slot, micro, out = self._begun.popleft()
        if self.stage.count > 1:
            with self._losing_all_on_failure():
                self._ring.receive()
            out = results_in(self, slot, micro)
        hidden = out.hidden if micro.task is Task.LOGITS_AND_HIDDEN else out.hidden[:0]
        return HiddenAndLogits(on_host(hidden), on_host(out.logits))

    @contextmanager
    def _losing_all_on_failure(self) -> Iterator[None]:
        """Lose all ranks if the body fails, which computes with them; raises RankLost."""
        try:
            yield
        except BaseException as error:
            # The other ranks are in the middle of the step, and would take the next one's numbers for this one's.
            self._followers.lose(f"the first rank failed in a step: {error!r}")
            if isinstance(error, Exception):
                raise RankLost(f"the step can't be computed: {self._followers.why_lost or repr(error)}") from error
            raise


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


class FollowingRank:
    """One rank behind the first. `load`, then `follow`, in one thread."""

    def __init__(self, spec: RankSpec, rank: int, files: RankFiles) -> None:
        self._spec = spec
        self._parts = RankParts(spec, rank, files)
        # One rank of each stage behind the first is told of micro-batches, and the others wait for it.
        leads = not self._parts.stage.is_first and self._parts.shard.rank == 0
        self._ring = StageRing(files.receiving, files.sending) if leads else None
        self._model: LoadedModel | None = None

    def load(self) -> None:
        """Read the model's configuration, and map its weights. Raises ConfigError."""
        spec = self._spec
        prepare(spec.least_threads)
        how = WeightSpec(spec.dtype, spec.quantization, spec.dequantize, in_parts=True)
        self._model = load_model_for(self._parts.operations, Path(spec.model_dir), how, CPU)

    def follow(self, on_loaded: Callable[[], None] = lambda: None) -> None:
        """Compute what the first rank announces until a rank is lost; raises RankLost then.

        `on_loaded` is called once the weights are packed.
        """
        if self._model is None:
            raise RuntimeError("the model is not loaded")
        spec, parts = self._spec, self._parts
        transformer = Transformer(
            self._model, parts.operations, spec.block_size, spec.cache, spec.least_threads, parts.stages
        )
        self._model = None
        on_loaded()
        while True:
            if self._ring is not None:
                self._ring.receive()
            slot = parts.slots.next()
            parts.ranks.barrier.wait(BarrierTag.STEP)
            compute_part(transformer, parts.shard, slot, slot.read())
            parts.ranks.barrier.wait(BarrierTag.DONE)
            if self._ring is not None:
                parts.ranks.trim()
                self._ring.send()

    def close(self) -> None:
        """Close the rank's ends of the ring."""
        if self._ring is not None:
            self._ring.close()
