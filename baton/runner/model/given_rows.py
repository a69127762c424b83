"""Rows that replace what a model's embedding gives at some positions, and how they get into transformers' own loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn


class GivenRows(NamedTuple):
    """Rows in place of the embedding's output."""

    at: torch.Tensor
    """Their places among the step's rows, int64 [G]."""
    rows: torch.Tensor
    """[G, width] in the dtype of the embedding's output."""

    def replace_in(self, x: torch.Tensor) -> torch.Tensor:
        """The output [T, width] of the embedding with these rows, which it is changed to."""
        x[self.at] = self.rows
        return x


@contextmanager
def given_to(embedding: nn.Module, given: GivenRows) -> Iterator[None]:
    """Let an embedding give these rows in the body, as a model of transformers takes them by `inputs_embeds`."""

    def replaced(_module: nn.Module, _arguments: Any, out: torch.Tensor) -> torch.Tensor:
        given.replace_in(out[0])
        return out

    handle = embedding.register_forward_hook(replaced)
    try:
        yield
    finally:
        handle.remove()
