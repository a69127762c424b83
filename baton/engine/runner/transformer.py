"""A loaded model with its products and attention replaced, and the cache it computes on: rows in, logits out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from baton.engine.runner.attention import PagedAttention, ProbeAttention, StepLayout, UnsupportedAttention, bind
from baton.engine.runner.base import KVLayout
from baton.engine.runner.input_batch import FlatBatch
from baton.engine.runner.layers import ProductWatch, replace_products
from baton.engine.runner.operations import Operations
from baton.engine.runner.weights import DTYPES, LoadedModel
from baton.errors import ConfigError

_VECTOR = 64
"""Elements that an elementwise kernel of torch treats as one piece, at most (AVX-512: two registers of bfloat16)."""
_MAX_ELEMENTWISE_THREADS = 2
_PROBE_ROWS = 8


@dataclass(frozen=True, slots=True)
class CacheSize:
    """Exactly one of the two is set."""

    num_blocks: int | None = None
    cache_bytes: int | None = None

    def blocks(self, block_bytes: int) -> int:
        """How many blocks; raises ConfigError when that is not at least two (the first is the null block)."""
        if (self.num_blocks is None) == (self.cache_bytes is None):
            raise ConfigError("set exactly one of the number of KV blocks and the bytes for them")
        blocks = self.num_blocks if self.num_blocks is not None else (self.cache_bytes or 0) // block_bytes
        if blocks < 2:
            raise ConfigError(f"room for {blocks} KV blocks of {block_bytes} bytes is too little; give at least 2")
        return blocks


def row_quantum(widths: list[int], num_threads: int) -> int:
    """Rows to pad to, so that no element of a real row is ever in the tail of an elementwise kernel.

    torch's vectorised functions (silu, gelu, tanh, cos) round differently in the scalar tail that follows the last full
    vector of a tensor, or of a thread's share of it. If rows x width is a multiple of the vector for every width, and
    splits evenly over the threads, there is no tail.
    """
    common = math.gcd(*widths)
    return _VECTOR // math.gcd(common, _VECTOR) * elementwise_threads(num_threads)


def elementwise_threads(num_threads: int) -> int:
    """torch's own threads: one or two, since shares of three or more can't be kept aligned by padding."""
    return max(1, min(num_threads, _MAX_ELEMENTWISE_THREADS))


class Transformer:
    """One model and one cache. Called from one thread."""

    def __init__(
        self, model: LoadedModel, operations: Operations, block_size: int, cache_size: CacheSize, num_threads: int
    ) -> None:
        self._module: Any = model.module
        self.row_quantum = row_quantum(_widths(model), num_threads)
        replace_products(model.module, operations, self.row_quantum)
        probe = ProbeAttention()
        watch = ProductWatch()
        bind(model.module, probe)
        with watch:
            self._probe()
        if probe.num_layers != model.config.num_hidden_layers:
            raise UnsupportedAttention(
                f"{model.architecture} has {model.config.num_hidden_layers} layers, {probe.num_layers} with attention; "
                "layers without attention are not supported yet"
            )
        self.missed_products = frozenset(watch.missed)
        self.layout = KVLayout(block_size, probe.num_layers, probe.num_kv_heads, probe.head_dim, model.dtype)
        self.kv_cache = torch.zeros(
            cache_size.blocks(self.layout.block_bytes),
            probe.num_layers,
            2,
            probe.num_kv_heads,
            block_size,
            probe.head_dim,
            dtype=DTYPES[model.dtype],
        )
        self._attention = PagedAttention(operations, self.kv_cache)
        bind(model.module, self._attention)

    def compute(self, batch: FlatBatch, logits_rows: npt.NDArray[np.int64] | None = None) -> npt.NDArray[np.float32]:
        """Compute a step: stores its keys and values, returns float32 logits [rows, vocabulary].

        The rows are those that sample, or `logits_rows` when given.
        """
        self._attention.layout = StepLayout(
            query_start=torch.from_numpy(batch.query_start),
            seq_lens=torch.from_numpy(batch.seq_lens),
            block_tables=torch.from_numpy(batch.block_tables),
            slots=torch.from_numpy(batch.slots),
        )
        try:
            return self._forward(
                batch.token_ids, batch.positions, batch.logits_rows if logits_rows is None else logits_rows
            )
        finally:
            self._attention.layout = None

    def copy_blocks(self, sources: list[int], destinations: list[int]) -> None:
        """Copy whole blocks within the cache."""
        with torch.inference_mode():
            self.kv_cache[destinations] = self.kv_cache[sources]

    def _probe(self) -> None:
        rows = np.zeros(_PROBE_ROWS * self.row_quantum, dtype=np.int64)
        self._forward(rows, np.arange(rows.size), rows[:1])

    def _forward(
        self, token_ids: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], logits_rows: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float32]:
        with torch.inference_mode():
            out = self._module(
                input_ids=torch.from_numpy(token_ids).unsqueeze(0),
                position_ids=torch.from_numpy(positions).unsqueeze(0),
                use_cache=False,
                logits_to_keep=torch.from_numpy(logits_rows),
            )
            logits: npt.NDArray[np.float32] = out.logits[0].to(torch.float32).numpy()
        return logits


def _widths(model: LoadedModel) -> list[int]:
    """Every row width that an elementwise function may see."""
    config = model.config
    widths = {parameter.shape[-2] for parameter in model.module.parameters() if parameter.dim() >= 2}
    widths |= {parameter.shape[-1] for parameter in model.module.parameters()}
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return [*widths, head_dim]
