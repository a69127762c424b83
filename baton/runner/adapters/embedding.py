"""The embedding of a model, to whose rows adapters may add: factor * B A, of which A has a column for each token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from baton.runner.adapters.adaptable import RowsOfStep
from baton.runner.backends.operations import Operations


@dataclass(frozen=True, slots=True)
class _EmbeddingAdapter:
    """What one adapter adds to the embedding."""

    columns: torch.Tensor
    """Float32 [vocabulary, rank], with the factor: A transposed."""
    packed: Any
    """B, packed in float32."""


class AdaptableEmbedding:
    """Adds to the rows that the embedding returns what the adapters of the step's rows add."""

    def __init__(
        self, name: str, part: nn.Module, rows: RowsOfStep, vocab_size: int, width: int, device: torch.device
    ) -> None:
        self.name = name
        self.vocab_size = vocab_size
        self.width = width
        self._part = part
        self._rows = rows
        self._device = device
        self._operations: Operations | None = None
        scale = getattr(part, "embed_scale", None)
        self._scale = 1.0 if scale is None else float(scale)
        part.register_forward_hook(self._add)

    @classmethod
    def of(cls, name: str, part: Any, rows: RowsOfStep, device: torch.device) -> AdaptableEmbedding | None:
        """The embedding of a model; None for a stage that has none."""
        if isinstance(part, nn.Embedding):
            return cls(name, part, rows, part.num_embeddings, part.embedding_dim, device)
        head = getattr(part, "shared_weight", None)
        return None if head is None else cls(name, part, rows, head.out_features, head.in_features, device)

    def adapt(self, operations: Operations, a: torch.Tensor, b: torch.Tensor, factor: float) -> _EmbeddingAdapter:
        """Prepare A [rank, vocabulary] and B [width, rank] of an adapter."""
        self._operations = operations
        return _EmbeddingAdapter((a.T * (factor * self._scale)).contiguous(), operations.pack_own(b.to(self._device)))

    def weight_rows(self, index: torch.Tensor) -> torch.Tensor:
        """The rows `index` of the weight, without its scale: [rows, width]."""
        if isinstance(self._part, nn.Embedding):
            return self._part.weight[index.to(self._part.weight.device)]
        rows: torch.Tensor = self._part.shared_weight.take_rows(index)  # type: ignore[union-attr, operator]
        return rows

    def _add(self, _part: nn.Module, given: Any, out: torch.Tensor) -> torch.Tensor | None:
        slots = self._rows.slots
        if slots is None or all(one is None for one in self._rows.table.embeddings):
            return None
        token_ids: torch.Tensor = given[0].reshape(-1)
        rows = out.view(-1, out.shape[-1]).clone()
        for slot in torch.unique(slots).tolist():
            adapter: _EmbeddingAdapter | None = self._rows.table.embeddings[slot] if slot >= 0 else None
            if adapter is None or self._operations is None:
                continue
            own = (slots == slot).nonzero().flatten()
            t = adapter.columns[token_ids.cpu()[own]].to(rows.device)
            more = self._operations.linear(t, adapter.packed)
            own = own.to(rows.device)
            rows[own] = (rows[own].float() + more).to(rows.dtype)
        return rows.view(out.shape)
