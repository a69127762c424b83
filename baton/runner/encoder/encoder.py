"""An encoder with its products and attention replaced: from the rows of a step to hidden states.

transformers' loop over the layers runs on the rows of several texts at once, one behind the other. Products and
attention are Baton's operations; norms and activations are torch's, of which each treats a row alone. So the bits of a
text's rows are a function of the text.

Keys and values are needed within one layer only: a cache of one layer's blocks serves all of them in turn.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from baton.engine.runner import PROBE_BLOCKS, KVLayout, KVMemory, LayerGeometry
from baton.errors import ConfigError
from baton.messages.pooling import ModelPooling, Pooling
from baton.runner.backends.attention_call import AttentionCall, StepLayout
from baton.runner.backends.operations import Operations
from baton.runner.backends.torch_operations import TorchOperations
from baton.runner.encoder.head import ClassificationHead
from baton.runner.execution.input_batch import FlatBatch
from baton.runner.model.attention import (
    Attend,
    AttentionParameters,
    ProbeAttention,
    UnsupportedAttention,
    cache_views,
    dense_rows,
)
from baton.runner.model.layers import ProductWatch, replace_products
from baton.runner.model.long_angles import refuse_long_angles
from baton.runner.model.mapped_files import MappedFiles
from baton.runner.model.quantization.stored_weight import UnusableWeight
from baton.runner.model.transformer import on_device, on_host, row_quantum, row_widths
from baton.runner.model.weights import DTYPES, LoadedModel
from baton.runner.spec import CacheSpec

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
    ) -> torch.Tensor:
        layout = self.layout
        if layout is None:
            raise RuntimeError("attention was called outside of a step")
        self._operations.store_kv(dense_rows(key), dense_rows(value), self._cache, layout.slots[0])
        both_ways = replace(how, sinks=None, ahead=_ALL if how.window is None else how.window - 1)
        return self._operations.paged_attention(
            AttentionCall(
                dense_rows(query), self._cache, layout.query_start, layout.seq_lens, layout.block_tables[0], both_ways
            )
        )


class Encoder:
    """One encoder. Called from one thread."""

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
        with on_device(model.device):
            self._build(model, pooling, operations, block_size, cache, num_threads)

    def _build(
        self,
        model: LoadedModel,
        pooling: ModelPooling,
        operations: Operations,
        block_size: int,
        cache: CacheSpec,
        num_threads: int,
    ) -> None:
        self.device, self.dtype = model.device, DTYPES[model.dtype]
        self.max_length = pooling.max_length
        self.vocab_size: int = model.config.vocab_size
        self._operations = operations
        self._pooling = pooling
        module: Any = model.module
        self.row_quantum = row_quantum(row_widths(model), num_threads)
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
        self.layout = KVLayout(block_size, (geometry,), model.dtype)
        most = -(-max(_MOST_TOKENS, 2 * self.max_length) // block_size)
        self.num_blocks = min(cache.blocks(self.layout.block_bytes), most)
        elements = (self.num_blocks + PROBE_BLOCKS) * self.layout.block_elements
        self._memory = torch.zeros(elements, dtype=self.dtype, device=self.device)
        self._attention = BothWays(operations, self._memory, self.layout)
        self._bind(self._attention)

    @property
    def head_pooling(self) -> Pooling | None:
        """The hidden states that the classification head reads; None without a head."""
        return None if self._head is None else self._head.pooling

    @property
    def memory(self) -> KVMemory:
        return KVMemory(
            base_address=self._memory.data_ptr(),
            num_blocks=self.num_blocks,
            block_bytes=self.layout.block_bytes,
            kind="DRAM" if self.device.type == "cpu" else "VRAM",
            device_id=self.device.index or 0,
            owner=self._memory,
            num_probe_blocks=PROBE_BLOCKS,
            layout=self.layout,
        )

    def compute(self, batch: FlatBatch, token_types: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """The hidden states [rows, size] of texts that begin and end in this step; `token_types` [rows]."""
        with on_device(self.device), torch.inference_mode():
            self._attention.layout = StepLayout(
                query_start=self._tensor(batch.query_start),
                seq_lens=self._tensor(batch.seq_lens),
                block_tables=[self._tensor(tables) for tables in batch.block_tables],
                slots=[self._tensor(slots) for slots in batch.slots],
                sample_start=self._tensor(batch.sample_start),
            )
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

    def set_rows_per_call(self, rows: int) -> None:
        """Make torch's products take so many rows in one call, before anything is computed that counts."""
        assert isinstance(self._operations, TorchOperations)
        self._operations.rows_per_call = rows

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

    def _tensor(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)

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
        try:
            with watch, torch.inference_mode():
                rows = self._forward((at * 7919) % self.vocab_size, positions, np.zeros_like(at))
                if self._head is not None:
                    self._head.outputs(rows[:1])
        except (RuntimeError, ValueError, IndexError, ArithmeticError) as error:
            reason = (str(error).splitlines() or [""])[0]
            raise UnusableWeight(f"a step with them fails with {type(error).__name__} ({reason:.200})") from error
        self.embedding_size = int(rows.shape[1])
        self.missed_products = frozenset(watch.missed)
        geometries = set(probe.layers.values())
        if len(geometries) != 1 or sorted(probe.layers) != list(range(len(self._layers))):
            raise UnsupportedAttention(f"{architecture} has layers of different attention, or none")
        return geometries.pop()


def _attention_layers(base: nn.Module) -> list[Any]:
    """The modules that call transformers' AttentionInterface, in order."""
    return [part for part in base.modules() if hasattr(part, "is_causal")]


def check_not_divided(tensor_parallel: int, pipeline_parallel: int) -> None:
    """Raises ConfigError for an encoder that several processes are to compute."""
    if tensor_parallel * pipeline_parallel > 1:
        raise ConfigError("an encoder is computed by one process: leave --tp, --pp and --hosts out")
