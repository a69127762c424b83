"""A rank behind the first: it loads its part of the model, and computes what the first one announces."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from baton.errors import ConfigError
from baton.runner.backends.cpu.kernel_file import why_slow
from baton.runner.backends.device import CPU
from baton.runner.backends.kernel_choice import CompiledOperations, choose_operations
from baton.runner.backends.ranks.host_ranks import HostRanks, SharedFiles
from baton.runner.backends.ranks.shard import Shard
from baton.runner.backends.sharded.sharded_operations import ShardedOperations
from baton.runner.model import attention, layers
from baton.runner.model.transformer import Transformer, elementwise_threads
from baton.runner.model.weights import LoadedModel, load_model_for
from baton.runner.ranks.rank_spec import RankSpec
from baton.runner.ranks.step_board import StepBoard, Task, batch_of


class FollowingRank:
    """One rank behind the first. `load`, then `follow`, in one thread."""

    def __init__(self, spec: RankSpec, rank: int, files: SharedFiles) -> None:
        self._spec = spec
        self._ranks = HostRanks(Shard(rank, spec.size), files)
        self._board = StepBoard(self._ranks, files)
        self._operations = sharded_operations(spec.threads_of(rank), self._ranks)
        self._model: LoadedModel | None = None

    def load(self) -> None:
        """Read the model's configuration, and map its weights. Raises ConfigError."""
        spec = self._spec
        torch.set_num_threads(elementwise_threads(spec.least_threads))
        attention.register()
        layers.register()
        self._model = load_model_for(
            self._operations, Path(spec.model_dir), spec.dtype, CPU, spec.quantization, dequantize=spec.dequantize
        )

    def follow(self, on_loaded: Callable[[], None] = lambda: None) -> None:
        """Compute what the first rank announces until a rank is lost; raises RankLost then.

        `on_loaded` is called once the weights are packed.
        """
        if self._model is None:
            raise RuntimeError("the model is not loaded")
        spec = self._spec
        transformer = Transformer(self._model, self._operations, spec.block_size, spec.cache, spec.least_threads)
        self._model = None
        on_loaded()
        while True:
            task, arrays = self._board.next()
            batch, logits_rows = batch_of(arrays)
            if task is Task.LOGITS:
                transformer.compute(batch, logits_rows)
            else:
                transformer.compute_with_hidden(batch, logits_rows)
            self._board.done()


def sharded_operations(num_threads: int, ranks: HostRanks) -> ShardedOperations:
    """The operations of one rank; raises ConfigError where the C kernels can't be used."""
    operations = choose_operations(num_threads)
    if not isinstance(operations, CompiledOperations):
        raise ConfigError(
            "a model can be divided among ranks only with Baton's own kernels, which can't be used here "
            f"({why_slow()}); leave --tp out"
        )
    return ShardedOperations(operations, ranks)
