"""Loads the model that drafts tokens beside another one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from baton.engine.runner import ModelInfo
from baton.errors import ConfigError
from baton.messages.node_report import ComputePath
from baton.runner.backends.cpu.kernels import KernelArgumentError
from baton.runner.backends.operations import Operations
from baton.runner.execution.draft_model import DraftModel
from baton.runner.model.attention import UnsupportedAttention
from baton.runner.model.stored.weight import UnusableWeight
from baton.runner.model.transformer import Transformer
from baton.runner.model.weights import LoadedModel, load_model_for
from baton.runner.spec import DraftSpec

_MAX_DRAFTING = 64
"""The most requests whose drafts may all reach beyond their blocks in one step."""


@dataclass(frozen=True, slots=True)
class LoadedDraftModel:
    """A draft model whose cache is not allocated yet."""

    spec: DraftSpec
    loaded: LoadedModel
    transformer: Transformer

    @classmethod
    def load(
        cls, spec: DraftSpec, beside: LoadedModel, operations: Operations, block_size: int, num_threads: int
    ) -> Self:
        """Load a model to draft for another one, on its device and with its dtype. Raises ConfigError."""
        loaded = load_model_for(operations, spec.model_dir, beside.dtype, beside.device, spec.quantization)
        try:
            transformer = Transformer(loaded, operations, block_size, None, num_threads)
        except (UnusableWeight, UnsupportedAttention, KernelArgumentError) as error:
            raise ConfigError(f"the model in {spec.model_dir} can't draft: {error}") from error
        return cls(spec, loaded, transformer)

    @property
    def num_scratch_blocks(self) -> int:
        """The blocks for drafts that reach beyond the blocks of their requests."""
        return _MAX_DRAFTING * -(-self.spec.num_tokens // self.transformer.layout.block_size)

    def start(self, drafted_for: Transformer, model: ModelInfo) -> DraftModel:
        """Allocate the cache, with a block for each of the other model's. Raises ConfigError.

        `drafted_for` and `model`: the other model, whose requests end with its own tokens.
        """
        layout = drafted_for.layout
        self.transformer.allocate_cache(drafted_for.num_blocks + self.num_scratch_blocks)
        return DraftModel(
            self.transformer,
            num_blocks=drafted_for.num_blocks,
            num_scratch_blocks=self.num_scratch_blocks,
            num_groups=len(layout.groups),
            max_model_len=self.transformer.max_model_len,
            vocab_size=self.loaded.config.vocab_size,
            drafted_vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
        )

    def path(self, drafted_for: Transformer) -> ComputePath:
        """What drafts, for operators."""
        weights = self.loaded.weights
        name = self.spec.model_dir.resolve().name
        why_worse = (
            "every layer of the model has an attention window, so drafts see no more of a text than the blocks that "
            "the window has not passed"
            if drafted_for.layout.windows[0] is not None
            else ""
        )
        made_of = weights.description or self.loaded.dtype
        return ComputePath("drafts", f"{name}, {made_of}, {weights.num_bytes >> 20} MiB", why_worse)
