"""The positions of a step's rows, which layers are told apart from the rows, or find out by counting.

Some layers count the tokens that a cache holds before a call to know where its rows are. A step has rows of many
sequences, so the number differs from row to row: it is the row's position less its place in the step. Layers add the
places themselves.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch


class TokensBefore:
    """A cache of transformers that holds nothing, and counts the tokens before each row of a step."""

    is_sliding = ()

    def __init__(self) -> None:
        self._before = torch.zeros(1, dtype=torch.int64)
        self.was_asked = False
        """Whether a layer has asked for the number of tokens."""

    def begin(self, positions: torch.Tensor) -> TokensBefore:
        """This, for a step of rows at these positions, int64 [T]."""
        self._before = positions - torch.arange(positions.shape[-1], device=positions.device)
        return self

    def get_seq_length(self, layer_idx: int = 0) -> torch.Tensor:
        """The number of tokens before each row, less those that are rows of the step: int64 [T]."""
        self.was_asked = True
        return self._before

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """No masks are made of it."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """No masks are made of it."""
        return query_length, 0

    def update(self, key: torch.Tensor, value: torch.Tensor, *_arguments: Any, **_named: Any) -> tuple[Any, Any]:
        """The keys and values themselves: the paged attention keeps them."""
        return key, value


def has_grids(config: Any) -> bool:
    """Whether rotary positions have three dimensions, those of images in grids (M-RoPE)."""
    return "mrope_section" in (getattr(config, "rope_parameters", None) or {})


def apart(places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Positions [3, T] that differ in the three dimensions."""
    return np.stack([places, places[::-1], places // 2])
