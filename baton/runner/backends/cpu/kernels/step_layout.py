"""The layout of a step: which rows belong to which sequence, and which blocks the sequences have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class StepLayout:
    """The layout of a step with T rows for B sequences. Rows behind the last sequence's rows are padding."""

    query_start: torch.Tensor
    """int32 [B + 1]: sequence b has the rows query_start[b] to query_start[b + 1]."""
    seq_lens: torch.Tensor
    """int32 [B]: the number of a sequence's keys, those of this step included."""
    block_tables: Sequence[torch.Tensor]
    """For each group of layers int32 [B, W]: the blocks of each sequence."""
    slots: Sequence[torch.Tensor]
    """For each group of layers int64 [T]: block * block_size + offset of each row; negative for padding."""
    sample_start: torch.Tensor
    """int32 [B + 1]: like query_start, but counting only the rows that sample, which are one or none a sequence."""
    sharing: Sequence[torch.Tensor | None] = ()
    """For each group of layers what `shared_splits.find_shared_splits` found, or None; empty: None for all."""
