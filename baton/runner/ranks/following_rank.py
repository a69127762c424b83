"""A rank behind the first: it loads its part of the model, and computes what the first one announces."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from baton.runner.backends.cpu.kernels.barrier import BarrierTag
from baton.runner.backends.device import CPU
from baton.runner.load_steps import prepare
from baton.runner.model.transformer import Transformer
from baton.runner.model.weights import LoadedModel, load_model_for
from baton.runner.ranks.group_files import RankFiles
from baton.runner.ranks.rank_parts import RankParts
from baton.runner.ranks.rank_spec import RankSpec
from baton.runner.ranks.stage_part import compute_part
from baton.runner.ranks.stage_ring import StageRing
from baton.runner.spec import WeightSpec


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
