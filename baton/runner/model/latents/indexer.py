"""What selects the keys of an attention to latents (the indexer of DeepSeek-V3.2, arXiv 2512.02556, section 2.1).

A token has a key for its selection, too, which lies behind its latent in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from baton.runner.adapters.adaptable import AdaptableProduct, HasProducts
from baton.runner.backends.cpu.kernels.buffers import Rows
from baton.runner.backends.cpu.kernels.programs.program import Program
from baton.runner.backends.operations import Operations
from baton.runner.model.attention import KeyScores
from baton.runner.model.fused.rows import AnyNorm
from baton.runner.model.stored.layers import StoredLinear, weight_of

_LAYERS = ("wq_b", "wk", "weights_proj")
"""What transformers calls the layers that make queries, keys, and what each head's score counts."""


class Indexer(nn.Module, HasProducts):
    """The products, the norm and the rotation of the queries and keys by which keys are selected."""

    def __init__(self, operations: Operations, given: Any) -> None:
        """`given`: transformers' module of the same name, of which `is_known` was found true."""
        super().__init__()
        self._operations = operations
        self.width: int = given.wk.out_features
        """D: the numbers of a key."""
        self.most: int = given.index_topk
        self.in_pairs = False
        """Whether each two neighbours are rotated together."""
        self._num_heads: int = given.n_heads
        self.scale: float = given.softmax_scale
        self._norm: AnyNorm = given.k_norm
        self._queries, self._keys, self._weights = (
            AdaptableProduct.of_layer(operations, name, weight_of(getattr(given, name))) for name in _LAYERS
        )
        weights = given.weights_proj
        self._weights_dtype = weights.dtype if isinstance(weights, StoredLinear) else weights.weight.dtype

    @staticmethod
    def is_known(given: Any) -> bool:
        """Whether a module has the parts of an indexer; what it computes is compared later."""
        layers = (getattr(given, name, None) for name in _LAYERS)
        numbers = (getattr(given, name, None) for name in ("index_topk", "n_heads", "qk_rope_head_dim"))
        width = getattr(getattr(given, "wk", None), "out_features", 0)
        return (
            all(isinstance(part, nn.Linear) and part.bias is None for part in layers)
            and all(isinstance(number, int) for number in numbers)
            and isinstance(getattr(given, "k_norm", None), AnyNorm)
            and isinstance(getattr(given, "softmax_scale", None), float)
            and width % 8 == 0
            and width >= given.qk_rope_head_dim
        )

    @property
    def products(self) -> Sequence[AdaptableProduct]:
        return self._queries, self._keys, self._weights

    def keys(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """The keys [T, D] of rows x [T, K]."""
        keys = self._norm.rows(self._keys.linear(x)).unsqueeze(1)
        return self._turned(keys, cos, sin)[:, 0]

    def scores(
        self, x: torch.Tensor, narrow: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, first: int
    ) -> KeyScores:
        """What selects keys for rows x [T, K], whose queries are made of `narrow`. `first`: where keys have theirs."""
        queries = self._queries.linear(narrow).view(x.shape[0], self._num_heads, self.width)
        weights = self._weights.linear(x.to(self._weights_dtype)).float() * self._num_heads**-0.5
        return KeyScores(self._turned(queries, cos, sin), weights, first, self.scale, self.most)

    @property
    def is_adapted(self) -> bool:
        """Whether an adapter of the step's rows changes a product that programs compute without adapters."""
        return self._weights_dtype == torch.float32 and self._weights.is_adapted

    def record_keys(self, program: Program, x: Rows, cos: Rows, sin: Rows, into: Rows, first: int) -> None:
        """Append to a program the writing of what `keys` gives to the columns from `first` on of other rows."""
        keys = self._norm.record(program, self._keys.record(program, x, None, into="keys"), into="normed keys")
        program.copy_columns(keys, into, width=self.width, to=first)
        program.rotate(into, into.width, cos, sin, first=first, in_pairs=self.in_pairs)

    def record_scores(self, program: Program, x: Rows, narrow: Rows, cos: Rows, sin: Rows) -> tuple[Rows, Rows]:
        """Append to a program what `scores` computes: the queries, and the weights in float32."""
        queries = self._queries.record(program, narrow, None, into="queries of indexer")
        queries = program.changeable(queries, into="rotated queries of indexer")
        program.rotate(queries, self.width, cos, sin, in_pairs=self.in_pairs)
        name = "weights of indexer"
        if x.dtype == self._weights_dtype:
            weights = self._weights.record(program, x, None, into=name)
            weights = weights if weights.dtype == torch.float32 else program.widened(weights, into=f"wide {name}")
        else:
            weights = program.linear(program.widened(x, into="wide rows"), self._weights.packed, None, into=name)
        return queries, program.scale(weights, self._num_heads**-0.5, into=f"scaled {name}")

    def _turned(self, rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        rows = rows.contiguous()
        self._operations.rotate(rows, cos, sin, in_pairs=self.in_pairs)
        return rows


class Selections:
    """The keys that the layers of a model have selected in a step; some layers take those of the one before them."""

    def __init__(self) -> None:
        self.is_taken = False
        """Whether any layer takes the selection of another."""
        self.latest: torch.Tensor | None = None
        """int64 [T, W] of all rows of the step."""
