"""A stage that another one leads: it loads its layers, and computes the micro-batches whose numbers arrive."""

from __future__ import annotations

import json
import os
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from baton.engine.runner import KVMemory
from baton.errors import BatonError, ConfigError, EngineFault
from baton.observe.rank_reports import rank_report
from baton.runner.adapters.commands import AdapterServant
from baton.runner.adapters.in_parts import AdaptersInParts
from baton.runner.backends.cpu.kernels.errors import KernelArgumentError, RankLost
from baton.runner.backends.device import resolve_device
from baton.runner.backends.kernel_choice import choose_operations
from baton.runner.blocks.host_blocks import host_blocks_in
from baton.runner.model.stage import StageReport, reports_from_json
from baton.runner.model.stored.weight import UnusableWeight
from baton.runner.model.weights import load_model_for
from baton.runner.ranks.micro_batch import MicroBatch, bytes_of, read_numbers, tensor_of
from baton.runner.ranks.rank import FirstRank, LeadingTransformer, StartRanks
from baton.runner.ranks.rank_group import RankGroup
from baton.runner.shared_by_loaders import numerics_of, prepare
from baton.runner.spec import WeightSpec
from baton.runner.stage_spec import StageSpec
from baton.runner.stages.frames import Frame, FrameKind, FrameReader, FrameWriter, StageLinks
from baton.runner.stages.stage_messages import StepCopies, figures_to_json

_MOST_FRAMES = 64
"""The most frames that wait for being computed."""
_FIGURES_EVERY_S = 5.0


class StageWorker:
    """One stage, which is not the last: its first rank. `load`, then `follow`, in one thread. It is the stage's view of
    all stages, too (`Stages`)."""

    def __init__(
        self,
        links: StageLinks,
        model_dir: Path,
        num_threads: int,
        device: str,
        on_lost_while_loading: Callable[[str], None] = lambda _why: None,
        start_ranks: StartRanks = RankGroup,
        adapter_roots: Callable[[], Sequence[str]] | None = None,
    ) -> None:
        """`links`: this end of the connections; the caller closes them. `model_dir`: this stage's copy of the model.
        `num_threads`: of all ranks of this stage together. `start_ranks`: starts those behind the first one.
        `adapter_roots`: the directories in and below which this host's operator allows adapters; None: those that the
        leader's operator allows, on the same host.

        `on_lost_while_loading` is called with the reason, in a thread of its own, when the leader is gone while the
        model is loaded, which may go on for minutes: a process ends itself then.
        """
        self._on_lost_while_loading = on_lost_while_loading
        self._is_ready = False
        self._has_failed = False
        self.links = links
        self._model_dir = model_dir
        self._num_threads = num_threads
        self._device = device
        self._start_ranks = start_ranks
        self._adapter_roots = adapter_roots
        self._first_rank: FirstRank | None = None
        self._reader = FrameReader(links.down)
        # A leader that is gone ends the connection; its interpreter may be busy for long.
        self._reader.silence_allowed = None
        self._writer = FrameWriter(links.up, "to-leader", self._lost)
        self._frames: queue.Queue[Frame | RankLost] = queue.Queue(_MOST_FRAMES)
        """What has arrived. It arrives while the stage computes, too."""
        self._ended = threading.Event()
        threading.Thread(target=self._listen, name="baton-from-leader", daemon=True).start()
        self._transformer: LeadingTransformer

    def load(self) -> None:
        """Load what the leader asks for. Raises RankLost, and ConfigError, which the leader is told."""
        frame = self._next()
        if frame.kind is not FrameKind.SPEC:
            raise RankLost(f"the leader sent {frame.kind.name}, and not what to load")
        try:
            spec = StageSpec.from_json(frame.payload)
            self._load(replace(spec, model_dir=str(self._model_dir), num_threads=self._num_threads))
        except (BatonError, ValueError) as error:
            if isinstance(error, RankLost):
                raise
            self.fail(str(error))
            raise error if isinstance(error, ConfigError) else ConfigError(str(error)) from error

    def _load(self, spec: StageSpec) -> None:
        device = resolve_device(self._device)
        if spec.tensor_parallel > 1 and device.type != "cpu":
            raise ConfigError(
                "several ranks of a stage share the memory of a host, and this host computes on a GPU: leave --tp out, "
                "or give --device cpu on all hosts"
            )
        prepare(spec.torch_threads)
        self.stage = spec.stage
        self._operations = choose_operations(self._num_threads, device)
        how = WeightSpec(spec.dtype, spec.quantization, spec.dequantize, in_parts=True)
        loaded = load_model_for(self._operations, self._model_dir, how, device)
        if loaded.fingerprint != spec.fingerprint:
            raise ConfigError(
                f"the model in {self._model_dir} has the fingerprint {loaded.fingerprint}, and the leader's "
                f"{spec.fingerprint}: give all hosts the same files"
            )
        if spec.tensor_parallel > 1:
            self._first_rank = FirstRank(spec, self, self._start_ranks)
        try:
            self._transformer = LeadingTransformer(loaded, self._operations, spec, self, self._first_rank)
        except (UnusableWeight, KernelArgumentError) as error:
            raise ConfigError(f"the model in {self._model_dir} can't be used: {error}") from error
        except RankLost as error:
            if self._why_ranks_lost:
                raise ConfigError(self._why_ranks_lost) from error
            raise
        if self._first_rank is not None:
            self._first_rank.followers.on_lost(self._ranks_lost)
        host_blocks = host_blocks_in(spec.host_cache_bytes, self._transformer.counted_block_bytes)
        self._host = self._transformer.host_blocks(host_blocks)
        self._numerics = partial(numerics_of, loaded.weights.treatment, self._operations, self._transformer.layout)
        adapters = self._transformer.adapters
        parts = AdaptersInParts(adapters) if self._first_rank is None else self._first_rank.adapters_of(adapters)
        answer = partial(self._writer.send, FrameKind.ADAPTER_ANSWER)
        self._adapters = AdapterServant(parts, answer, self._adapter_roots)
        self._is_ready = True
        followers = () if self._first_rank is None else self._first_rank.followers.pids
        self._writer.send(FrameKind.READY, json.dumps([os.getpid(), *followers]).encode())
        threading.Thread(target=self._tell_figures, name="baton-stage-figures", daemon=True).start()

    def exchange(self, own: StageReport) -> list[StageReport]:
        self._writer.send(FrameKind.REPORT, own.to_json())
        frame = self._next()
        if frame.kind is not FrameKind.REPORTS:
            raise RankLost(f"the leader sent {frame.kind.name} while the model was loading")
        return reports_from_json(frame.payload)

    @property
    def memory(self) -> KVMemory:
        """The memory of this stage's part of the KV cache, once the model is loaded."""
        return self._transformer.memory

    def follow(self) -> None:
        """Compute what the leader sends until it is lost; raises RankLost then."""
        waiting: list[MicroBatch] = []
        while True:
            frame = self._next()
            match frame.kind:
                case FrameKind.NUMBERS if self.stage.is_first:
                    self._compute(read_numbers(_reading(frame.payload)).micro, None)
                case FrameKind.NUMBERS:
                    waiting.append(read_numbers(_reading(frame.payload)).micro)
                case FrameKind.ROWS if waiting:
                    self._compute(waiting.pop(0), frame.payload)
                case FrameKind.COPIES:
                    self._copy(StepCopies.from_json(frame.payload))
                    self._writer.send(FrameKind.COPIED)
                case FrameKind.ADAPTER:
                    self._adapters.take(frame.payload)
                case FrameKind.ASK_NUMERICS:
                    self._writer.send(FrameKind.NUMERICS, self._numerics().encode())
                case FrameKind.ROWS_PER_CALL:
                    self._transformer.set_rows_per_call(int.from_bytes(frame.payload, "little"))
                case FrameKind.CLEAR:
                    self._transformer.clear_blocks(int.from_bytes(frame.payload, "little"))
                case _:
                    raise ValueError(f"the leader sent {frame.kind.name}, which no stage expects now")

    def fail(self, reason: str) -> None:
        """Tell the leader why this one ends."""
        self._has_failed = True
        self._writer.send(FrameKind.FAILED, reason.encode())

    def cut(self) -> None:
        """Make `follow` end with RankLost when it next waits, from any thread; idempotent."""
        self._writer.close()
        self.links.cut()

    def close(self) -> None:
        """Send what was said, cut the connections, and end the other ranks; idempotent."""
        self._ended.set()
        self.cut()
        if self._first_rank is not None:
            self._first_rank.close()

    def _compute(self, micro: MicroBatch, payload: bytearray | None) -> None:
        transformer, received = self._transformer, None
        if payload is not None:
            rows = tensor_of(payload, transformer.sent_dtype, micro.batch.token_ids.size, transformer.sent_width)
            received = rows.to(transformer.device)
        try:
            out = transformer.compute_stage(micro.batch, micro.logits_rows, received, wants_hidden=False)
        except RankLost as error:
            # The leader is there, and is told.
            raise EngineFault(self._why_ranks_lost or str(error)) from error
        self._writer.send(FrameKind.ROWS, bytes_of(out.hidden))

    @property
    def _why_ranks_lost(self) -> str:
        return "" if self._first_rank is None else self._first_rank.followers.why_lost

    def _ranks_lost(self, why: str) -> None:
        self.fail(why)
        self.cut()

    def _copy(self, copies: StepCopies) -> None:
        self._host.execute(copies)
        if copies.blocks_to_copy:
            self._transformer.copy_blocks(
                [copy.source for copy in copies.blocks_to_copy], [copy.destination for copy in copies.blocks_to_copy]
            )

    def _tell_figures(self) -> None:
        pids = [os.getpid(), *([] if self._first_rank is None else self._first_rank.followers.pids)]
        while not self._ended.is_set():
            self._writer.send(FrameKind.FIGURES, figures_to_json([rank_report(*one) for one in enumerate(pids)]))
            self._ended.wait(_FIGURES_EVERY_S)

    def _next(self) -> Frame:
        found = self._frames.get()
        if isinstance(found, RankLost):
            raise found
        return found

    def _listen(self) -> None:
        try:
            while True:
                self._frames.put(self._reader.read())
        except Exception as error:
            why = f"the leader {error}" if isinstance(error, RankLost) else f"nothing can be received: {error!r}"
            # A leader that was told of a failure is gone for that, and the failure is what to say.
            if not self._is_ready and not self._has_failed:
                self._on_lost_while_loading(why)
            self._frames.put(RankLost(why))

    def _lost(self, why: str) -> None:
        self.links.cut()


def _reading(payload: bytearray) -> Callable[[int], npt.NDArray[np.uint8]]:
    """What `read_numbers` reads from."""

    def memory_of(size: int) -> npt.NDArray[np.uint8]:
        if size > len(payload):
            raise ValueError(f"{len(payload)} bytes are too few for a micro-batch")
        return np.frombuffer(payload, np.uint8)

    return memory_of
