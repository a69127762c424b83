"""Rows that a model computes of each token for each of its layers, beside the embedding that the first layer is given.

Models with such rows have two methods in transformers: `get_per_layer_inputs` looks them up by token, and
`project_per_layer_inputs` adds what follows from the embedding.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import nn


def has_layer_inputs(base: Any) -> bool:
    """Whether a model, without its head, has such rows."""
    names = ("get_per_layer_inputs", "project_per_layer_inputs")
    return all(hasattr(base, name) for name in names) and bool(base.config.hidden_size_per_layer_input)


class LayerInputs:
    """The rows of all layers, side by side, of the tokens of a step."""

    def __init__(self, base: Any, parts: frozenset[nn.Module]) -> None:
        self._base = base
        self.parts = parts
        """The parts of the model that compute them."""
        self.layer_width: int = base.config.hidden_size_per_layer_input
        """N."""
        self.width: int = base.config.num_hidden_layers * self.layer_width
        """L * N."""

    @classmethod
    def of(cls, base: Any, token_ids: torch.Tensor, embedded: torch.Tensor) -> LayerInputs:
        """The inputs of a model that has some, which are computed once, for tokens [T] and their embedding [T, K]."""
        called: set[nn.Module] = set()
        inputs = cls(base, frozenset())
        with ExitStack() as hooks:
            for part in base.children():
                hooks.callback(part.register_forward_pre_hook(lambda part, _: called.add(part)).remove)
            inputs.rows(token_ids, embedded)
        return cls(base, frozenset(called))

    def rows(self, token_ids: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """The rows [T, L * N] of tokens int64 [T], whose embedding is [T, K]: of all layers, side by side."""
        by_token = self._base.get_per_layer_inputs(token_ids[None])
        rows: torch.Tensor = self._base.project_per_layer_inputs(embedded[None], by_token)
        return rows.reshape(token_ids.shape[0], -1)
