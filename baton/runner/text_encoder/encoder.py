"""An encoder with its products and attention replaced: from the rows of a step to hidden states.

transformers' loop over the layers runs on the rows of several texts at once, one behind the other. Products and
attention are Baton's operations; norms and activations are torch's, of which each treats a row alone. So the bits of a
text's rows are a function of the text.

Keys and values are needed within one layer only: a cache of one layer's blocks serves all of them in turn.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from baton.engine.runner import PROBE_BLOCKS, KVLayout, LayerGeometry
from baton.errors import ConfigError
from baton.messages.pooling import ModelPooling, Pooling
from baton.runner.backends.attention_call import AttentionCall, StepLayout
from baton.runner.backends.operations import Operations
from baton.runner.execution.input_batch import FlatBatch
from baton.runner.model.attention import Attend, AttentionParameters, UnsupportedAttention, cache_views, dense_rows
from baton.runner.model.cached_model import CachedModel, failing_as_unusable, on_device, on_device_of_model, on_host
from baton.runner.model.layers import ProductWatch, replace_products
from baton.runner.model.long_angles import refuse_long_angles
from baton.runner.model.probe_attention import ProbeAttention
from baton.runner.model.stored.mapped_files import MappedFiles
from baton.runner.model.weights import LoadedModel
from baton.runner.spec import CacheSpec


@dataclass(frozen=True, slots=True)
class ClassificationHead:
    """The head of one `…ForSequenceClassification` of transformers."""

    pooling: Pooling
    """The hidden states that it reads."""
    last_layer: nn.Module
    """The layer that gives a number for each label, before products are replaced: its results are float32."""
    outputs: Callable[[torch.Tensor], torch.Tensor]
    """Pooled hidden states [n, size] to the outputs [n, labels]."""

    @classmethod
    def of(cls, module: Any, config: Any) -> ClassificationHead:
        """The head of a loaded module; raises ConfigError for one of another build."""
        base = getattr(module, module.base_model_prefix)
        classifier: Any = getattr(module, "classifier", None)
        if isinstance(getattr(classifier, "out_proj", None), nn.Linear):
            # Roberta, Electra: the classifier takes hidden states [n, tokens, size], and the first token of each.
            return cls(Pooling.CLS, classifier.out_proj, lambda rows: module.classifier(rows[:, None]))
        if not isinstance(classifier, nn.Linear):
            raise ConfigError(f"{type(module).__name__} has no classifier that is supported; choose another model")
        if getattr(base, "pooler", None) is not None:  # Bert

            def of_bert(rows: torch.Tensor) -> torch.Tensor:
                logits: torch.Tensor = module.classifier(base.pooler(rows[:, None]))
                return logits

            return cls(Pooling.CLS, classifier, of_bert)
        if isinstance(getattr(module, "pre_classifier", None), nn.Linear):  # DistilBert

            def of_distilbert(rows: torch.Tensor) -> torch.Tensor:
                logits: torch.Tensor = module.classifier(torch.relu(module.pre_classifier(rows)))
                return logits

            return cls(Pooling.CLS, classifier, of_distilbert)
        kinds = {"cls": Pooling.CLS, "mean": Pooling.MEAN}
        kind = kinds.get(getattr(config, "classifier_pooling", ""))
        if kind is None or getattr(module, "head", None) is None:
            raise ConfigError(f"{type(module).__name__} has a head that is not supported; choose another model")
        return cls(kind, classifier, lambda rows: module.classifier(module.head(rows)))  # ModernBert


_MOST_TOKENS = 1 << 15
"""The most tokens whose keys and values the cache holds: it serves the steps that are being computed, and keeps nothing
for later."""
_ALL = 1 << 30
"""More keys than any text has."""
_PROBE_TOKENS = 8


class BothWays:
    """Attention within each text of a step, to the tokens before and behind."""

    def __init__(self, operations: Operations, memory: torch.Tensor, layout: KVLayout) -> None:
        """`memory`: the cache of one layer, flat."""
        self._operations = operations
        self._cache = cache_views(memory, layout, operations.ranks.shard)[0]
        self.layout: StepLayout | None = None
        """The step that is being computed; None between steps."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        how: AttentionParameters,
        *,
        sampling: bool = False,
        stores: bool = True,
        selected: torch.Tensor | None = None,
    ) -> torch.Tensor:
        layout = self.layout
        if layout is None:
            raise RuntimeError("attention was called outside of a step")
        self._operations.store_kv(dense_rows(key), dense_rows(value), self._cache, layout.slots[0])
        both_ways = replace(how, ahead=_ALL if how.window is None else how.window - 1)
        return self._operations.paged_attention(
            AttentionCall(
                dense_rows(query), self._cache, layout.query_start, layout.seq_lens, layout.block_tables[0], both_ways
            )
        )


class Encoder(CachedModel):
    """One encoder. Called from one thread."""

    @on_device_of_model
    def __init__(
        self,
        model: LoadedModel,
        pooling: ModelPooling,
        operations: Operations,
        block_size: int,
        cache: CacheSpec,
        num_threads: int,
    ) -> None:
        """Raises UnusableWeight and UnsupportedAttention for a model that can't be computed, and ConfigError."""
        super().__init__(model, operations, num_threads)
        self.max_length = pooling.max_length
        self.vocab_size: int = model.config.vocab_size
        self._pooling = pooling
        module: Any = model.module
        self._head = ClassificationHead.of(module, model.config) if pooling.labels else None
        module.to(self.device)
        release = MappedFiles(model.checkpoint.weight_files).release
        replace_products(
            module, operations, self.row_quantum, release, None if self._head is None else self._head.last_layer
        )
        self._base: Any = getattr(module, module.base_model_prefix, module)
        taken = inspect.signature(self._base.forward).parameters
        self._takes_types = "token_type_ids" in taken and pooling.has_token_types
        if "position_ids" not in taken:
            raise UnsupportedAttention(f"{model.architecture} takes no positions, so texts can't be computed together")
        refuse_long_angles(module, self.max_length)
        self._layers = _attention_layers(self._base)
        geometry = self._probe(model.architecture)
        self.layout = self.cache_layout = KVLayout(block_size, (geometry,), model.dtype)
        most = -(-max(_MOST_TOKENS, 2 * self.max_length) // block_size)
        cache = cache.with_room([self._room_for_cache(cache)], [self.layout.block_bytes], PROBE_BLOCKS)
        num_blocks = min(cache.blocks(self.layout.block_bytes), most)
        # Not written now: steps may never need all of it.
        elements = (num_blocks + PROBE_BLOCKS) * self.layout.block_elements
        self._hold(torch.zeros(elements, dtype=self.dtype, device=self.device))
        self._attention = BothWays(operations, self.kv_memory, self.layout)
        self._bind(self._attention)

    @property
    def head_pooling(self) -> Pooling | None:
        """The hidden states that the classification head reads; None without a head."""
        return None if self._head is None else self._head.pooling

    def compute(self, batch: FlatBatch, token_types: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """The hidden states [rows, size] of texts that begin and end in this step; `token_types` [rows]."""
        with on_device(self.device), torch.inference_mode():
            self._attention.layout = self._step_layout(batch)
            try:
                return on_host(self._forward(batch.token_ids, batch.positions, token_types))
            finally:
                self._attention.layout = None

    def classify(self, pooled: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """The outputs [labels] of the classification head for one pooled hidden state [size]."""
        assert self._head is not None
        with on_device(self.device), torch.inference_mode():
            row = torch.from_numpy(pooled).to(self.device, self.dtype)[None]
            outputs: npt.NDArray[np.float64] = on_host(self._head.outputs(row))[0].astype(np.float64)
            return outputs

    def _forward(
        self,
        token_ids: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        token_types: npt.NDArray[np.int64],
    ) -> torch.Tensor:
        types = {"token_type_ids": self._tensor(token_types)[None]} if self._takes_types else {}
        out = self._base(
            input_ids=self._tensor(token_ids)[None],
            position_ids=self._tensor(positions + self._pooling.first_position)[None],
            **types,
        )
        rows: torch.Tensor = out.last_hidden_state[0]
        return rows

    def _bind(self, attend: Attend) -> None:
        for index, part in enumerate(self._layers):
            # nn.Module's own __setattr__ would register it as a submodule.
            object.__setattr__(part, "baton_attend", attend)
            part.layer_idx = index

    def _probe(self, architecture: str) -> LayerGeometry:
        """Compute a step without attention; returns the geometry of the layers, which is the same for all."""
        probe, watch = ProbeAttention(), ProductWatch()
        self._bind(probe)
        at = np.arange(_PROBE_TOKENS * self.row_quantum)
        positions = at % min(_PROBE_TOKENS, self.max_length)
        with failing_as_unusable(), watch, torch.inference_mode():
            rows = self._forward((at * 7919) % self.vocab_size, positions, np.zeros_like(at))
            if self._head is not None:
                self._head.outputs(rows[:1])
        self.embedding_size = int(rows.shape[1])
        self.missed_products = frozenset(watch.missed)
        geometries = set(probe.layers.values())
        if len(geometries) != 1 or sorted(probe.layers) != list(range(len(self._layers))):
            raise UnsupportedAttention(f"{architecture} has layers of different attention, or none")
        if probe.have_sinks:
            raise UnsupportedAttention(f"{architecture} has attention sinks, which no encoder is computed with")
        return geometries.pop()


def _attention_layers(base: nn.Module) -> list[Any]:
    """The modules that call transformers' AttentionInterface, in order."""
    return [part for part in base.modules() if hasattr(part, "is_causal")]
