"""The decoder of a model with an encoder: its cache, and steps of rows of inputs and of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from baton.engine.runner import PROBE_BLOCKS, KVLayout, LayerGeometry
from baton.errors import ConfigError
from baton.model_formats.encoder_decoders import ALIGNMENT, EncoderDecoder
from baton.runner.adapters.model_adapters import ModelAdapters
from baton.runner.backends.operations import Operations
from baton.runner.encoder_decoder.alignment import alignment_heads, median_width, token_rows
from baton.runner.encoder_decoder.attention import (
    DecoderAttention,
    NoAttention,
    Sequences,
    attend_with,
    decoder_layers,
    distance_bias_of,
)
from baton.runner.execution.input_batch import NO_SLOT, FlatBatch
from baton.runner.execution.request_table import RequestState
from baton.runner.model.attention import cache_views
from baton.runner.model.cached_model import CachedModel, on_device, on_device_of_model, on_host
from baton.runner.model.decoder import HiddenAndLogits, ModelOutput
from baton.runner.model.layers import PackedLinear, ProductWatch, replace_products
from baton.runner.model.recognition import fuse
from baton.runner.model.stored.mapped_files import MappedFiles
from baton.runner.model.stored.plan import CheckpointNames
from baton.runner.model.transformer import Transformer
from baton.runner.model.weights import LoadedModel
from baton.runner.parts import Stage
from baton.runner.spec import CacheSpec


class StepPositions(nn.Module):
    """Stands for a decoder's embedding of positions: gives the rows of the positions of the step's tokens."""

    def __init__(self, weight: torch.Tensor, offset: int) -> None:
        """`weight` [positions, size]; the row of position 0 is `offset`."""
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone(), requires_grad=False)
        self._offset = offset
        self.positions = torch.empty(0, dtype=torch.int64)

    def forward(self, *_arguments: Any, **_keywords: Any) -> torch.Tensor:
        return self.weight[self.positions + self._offset]


class DecoderSteps(Transformer):
    """A decoder with cross-attention, and its KV cache. Called from one thread.

    Of a step's rows those of inputs give keys and values for the cross-attention of every layer, and those of tokens go
    through the layers. transformers' loop over the layers computes them.
    """

    @on_device_of_model
    def __init__(
        self,
        model: LoadedModel,
        shape: EncoderDecoder,
        operations: Operations,
        block_size: int,
        cache: CacheSpec,
        num_threads: int,
    ) -> None:
        if ALIGNMENT % block_size:
            raise ConfigError(
                f"a model with an encoder needs a block size that divides {ALIGNMENT}, and it is {block_size}: change "
                "--block-size"
            )
        CachedModel.__init__(self, model, operations, num_threads)
        self._shape = shape
        module: Any = model.module
        self._module = module
        self.width: int = model.config.hidden_size
        self.stage = Stage()
        self._decoder = None
        self.why_no_own_loop = self._why_not_fused = "it has an encoder, and transformers' loop runs"
        module.to(self.device)
        self._positions = _replace_positions(module.get_decoder())
        distance_bias = distance_bias_of(module.get_decoder(), self._shape.most_tokens)
        release = MappedFiles(model.checkpoint.weight_files).release
        fuse(module, operations, self.row_quantum, release)
        replace_products(module, operations, self.row_quantum, release)
        self._head: PackedLinear = module.get_output_embeddings()
        self.adapters = ModelAdapters(module, operations, self.dtype, self.row_quantum, self.device, CheckpointNames)
        self._logits_bias: torch.Tensor | None = getattr(module, "final_logits_bias", None)
        self._hidden_factor = self.width**-0.5 if getattr(model.config, "scale_decoder_outputs", False) else None
        layers = decoder_layers(module.get_decoder())
        self._num_layers = len(layers)
        geometry = [LayerGeometry(layer.num_heads, layer.head_dim, layer.head_dim) for layer in layers]
        dtype = model.dtype if cache.dtype == "auto" else cache.dtype
        self.layout = self.cache_layout = KVLayout(block_size, tuple(geometry), dtype)
        self.heads: Mapping[int, Sequence[int]] = {}
        """The heads that align transcripts, by layer; empty: none is known."""
        if self._shape.source == "speech":
            self.heads = alignment_heads(model.checkpoint.directory, len(layers), layers[0].num_heads)
        self._median_width = median_width(model.config)
        self.embedding_size = self.row_width = self.width
        self.num_logits = self._head.out_features
        self.why_no_given_rows = ""
        self.max_model_len = self._shape.max_model_len
        self.long_sequences = None
        self._distance_bias = distance_bias
        self._layers_of_entries = [*range(self._num_layers)]
        cache = cache.with_room([self._room_for_cache(cache)], [self.layout.block_bytes], PROBE_BLOCKS)
        self.allocate_cache(cache.blocks(self.layout.block_bytes))
        self.missed_products = self._find_missed_products()

    @property
    def own_layers(self) -> range:
        """All layers."""
        return range(self._num_layers)

    def _find_missed_products(self) -> frozenset[str]:
        """The names of torch's products in a step, its attention apart."""
        for layer in decoder_layers(self._module.get_decoder()):
            attend_with(layer.own, NoAttention())
            attend_with(layer.cross, NoAttention())
        with ProductWatch() as watch:
            self._compute(_probe(self.row_quantum, self.layout), np.arange(1), True)
        self._bind_to_cache()
        return frozenset(watch.missed)

    def allocate_cache(self, num_blocks: int) -> None:
        super().allocate_cache(num_blocks)
        self._bind_to_cache()

    def _bind_to_cache(self) -> None:
        views = cache_views(self.kv_cache, self.layout, self._operations.ranks.shard)
        self._own_attention: list[DecoderAttention] = []
        self._cross_attention: list[DecoderAttention] = []
        for layer, view in zip(decoder_layers(self._module.get_decoder()), views.values(), strict=True):
            own = DecoderAttention(self._operations, view, self._distance_bias)
            cross = DecoderAttention(self._operations, view)
            attend_with(layer.own, own)
            attend_with(layer.cross, cross)
            self._own_attention.append(own)
            self._cross_attention.append(cross)

    def compute_with_hidden(
        self, batch: FlatBatch, rows: npt.NDArray[np.int64] | None = None, num_logits: int | None = None
    ) -> HiddenAndLogits:
        """See `Transformer.compute_with_hidden`; the queries of the heads that align come with the wanted rows."""
        noting = [self._cross_attention[layer] for layer in self.heads]
        for attention, heads in zip(noting, self.heads.values(), strict=True):
            attention.noted_heads = heads
        try:
            output = super().compute_with_hidden(batch, rows, num_logits)
            noted = [attention.noted for attention in noting if attention.noted is not None]
            with on_device(self.device):
                return output._replace(queries=on_host(torch.cat(noted, dim=1))) if noted else output
        finally:
            for attention in noting:
                attention.noted_heads, attention.noted = (), None

    def token_rows(self, state: RequestState, queries: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """See `Aligner.token_rows`."""
        assert state.pooler is not None
        num_keys = state.spans[0].length
        blocks = self._tensor(state.block_table[: -(-num_keys // self.layout.block_size)].astype(np.int64))

        def of_heads() -> Iterator[tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]]:
            places = iter(range(queries.shape[1]))
            for layer, heads in self.heads.items():
                keys = on_host(self._cross_attention[layer].keys(blocks, num_keys)[list(heads)])
                for index in range(len(heads)):
                    yield np.ascontiguousarray(queries[:, next(places)]), keys[index]

        with on_device(self.device), torch.inference_mode():
            return token_rows(of_heads(), state.pooler.params.num_rows, self._median_width)

    def _compute(
        self,
        batch: FlatBatch,
        logits_rows: npt.NDArray[np.int64],
        sampling: bool,
        received: torch.Tensor | None = None,
        num_logits: int | None = None,
    ) -> ModelOutput:
        with torch.inference_mode():
            own, cross, tokens, positions, places = self._sequences(batch)
            for attention in self._own_attention:
                attention.sequences = own
            wanted_at = self._tensor(places[logits_rows])
            for attention in self._cross_attention:
                attention.sequences, attention.noted_rows = cross, wanted_at
            if self._positions is not None:
                self._positions.positions = positions
            try:
                hidden = self._module.get_decoder()(
                    input_ids=tokens[None], encoder_hidden_states=self._source_rows(batch)[None], use_cache=False
                ).last_hidden_state[0]
            finally:
                for attention in (*self._own_attention, *self._cross_attention):
                    attention.sequences = None
            wanted = hidden[wanted_at]
            return ModelOutput(wanted, self._logits(wanted[:num_logits]))

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden if self._hidden_factor is None else hidden * self._hidden_factor
        logits = self._head.rows(rows.contiguous())
        return logits if self._logits_bias is None else logits + self._logits_bias.to(logits)

    def _source_rows(self, batch: FlatBatch) -> torch.Tensor:
        """The step's rows of inputs [G, size]; one of zeros, which is stored nowhere, if there are none."""
        given = self._given(batch)
        return torch.zeros(1, self.width, dtype=self.dtype, device=self.device) if given is None else given.rows

    def _sequences(
        self, batch: FlatBatch
    ) -> tuple[Sequences, Sequences, torch.Tensor, torch.Tensor, npt.NDArray[np.int64]]:
        """What the step's tokens attend to, their ids [T] and positions [T], and the place of each row among them [R].

        Padded at the end to a multiple of the row quantum, and by one token at least.
        """
        sources = batch.sources
        if sources is None:
            sources = np.zeros((batch.seq_lens.size, 2), dtype=np.int32)
        num_rows, begin = sources[:, 0], sources[:, 1]
        counts = np.diff(batch.query_start)
        owners = np.repeat(np.arange(counts.size), counts)
        real = owners.size
        is_token = batch.positions[:real] >= begin[owners]
        rows = np.flatnonzero(is_token)
        places = np.full(batch.token_ids.size, -1, dtype=np.int64)
        places[rows] = np.arange(rows.size)
        padded = max(1, -(-rows.size // self.row_quantum)) * self.row_quantum
        token_ids, positions = np.zeros(padded, dtype=np.int64), np.zeros(padded, dtype=np.int64)
        slots = np.full(padded, NO_SLOT, dtype=np.int64)
        token_ids[: rows.size] = batch.token_ids[rows]
        positions[: rows.size] = batch.positions[rows] - begin[owners[rows]]
        slots[: rows.size] = batch.slots[0][rows]
        tables = batch.block_tables[0]
        first_block = begin[:, None] // self.layout.block_size
        # Behind the last block of a sequence nothing is read.
        columns = np.minimum(first_block + np.arange(tables.shape[1]), tables.shape[1] - 1)
        shifted = np.ascontiguousarray(np.take_along_axis(tables, columns, axis=1))
        starts = np.zeros(counts.size + 1, dtype=np.int32)
        np.cumsum(np.bincount(owners[rows], minlength=counts.size), out=starts[1:])
        own = Sequences(
            slots=self._tensor(slots),
            query_start=self._tensor(starts),
            seq_lens=self._tensor(np.maximum(batch.seq_lens - begin, 0).astype(np.int32)),
            block_tables=self._tensor(shifted),
        )
        given_slots = np.full(1, NO_SLOT, dtype=np.int64) if batch.given_at is None else batch.slots[0][batch.given_at]
        # A step without tokens has one sequence without rows: kernels of GPUs need one.
        of_rows = owners[rows] if rows.size else np.zeros(1, dtype=np.int64)
        cross = Sequences(
            slots=self._tensor(given_slots),
            query_start=self._tensor(np.minimum(np.arange(of_rows.size + 1), rows.size).astype(np.int32)),
            seq_lens=self._tensor(num_rows[of_rows].astype(np.int32)),
            block_tables=self._tensor(np.ascontiguousarray(tables[of_rows])),
        )
        return own, cross, self._tensor(token_ids), self._tensor(positions), places


def _replace_positions(decoder: Any) -> StepPositions | None:
    """Put the rows of the step's positions in place of a decoder's embedding of positions; None: it has none."""
    embedding = getattr(decoder, "embed_positions", None)
    if embedding is None:
        return None
    # BART's table has two rows before that of position 0.
    decoder.embed_positions = StepPositions(embedding.weight, getattr(embedding, "offset", 0))
    positions: StepPositions = decoder.embed_positions
    return positions


def _probe(num_rows: int, layout: KVLayout) -> FlatBatch:
    """Rows of no sequence, which are stored nowhere."""
    nothing = np.zeros(num_rows, dtype=np.int64)
    return FlatBatch(
        token_ids=nothing,
        positions=nothing,
        slots=np.full((1, num_rows), NO_SLOT, dtype=np.int64),
        query_start=np.zeros(2, dtype=np.int32),
        sample_start=np.zeros(2, dtype=np.int32),
        seq_lens=np.zeros(1, dtype=np.int32),
        block_tables=np.zeros((1, 1, 1), dtype=np.int32),
        logits_rows=nothing[:0],
    )
