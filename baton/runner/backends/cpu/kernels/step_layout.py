"""Which rows of a step belong to whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class StepLayout:
    """Rows past the last sequence's are padding.

    query_start int32 [B + 1], seq_lens int32 [B] (keys of the sequence, this step's included), sample_start int32
    [B + 1] (as query_start, of the rows that sample: one or none a sequence); and for each group of layers block_tables
    int32 [B, W] and slots int64 [T] (block * block_size + offset; negative for padding).
    """

    query_start: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: Sequence[torch.Tensor]
    slots: Sequence[torch.Tensor]
    sample_start: torch.Tensor
