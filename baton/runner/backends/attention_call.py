"""What attention is asked for: which rows and blocks a step's sequences have, and one call for one layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from baton.runner.backends.paged_cache import CacheView

if TYPE_CHECKING:
    from baton.runner.backends.attention_work.step_work import StepWork


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
    work: Sequence[StepWork] = ()
    """For each group of layers, on GPUs, how its attention is dealt; empty: the operations find out."""
    sample_work: Sequence[StepWork] = ()
    """`work` of the rows that sample alone."""
    kept_lens: torch.Tensor | None = None
    """int32 [B]: how many tokens of each sequence the states of layers that keep one may cover, which are all but its
    drafts (state_calls.py). None: seq_lens."""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionFeatures:
    """How a layer's scores are made, and which keys its queries attend to. Without more it is causal."""

    scale: float
    window: int | None = None
    """The most keys that a query attends to, its own included; None: all of them."""
    softcap: float | None = None
    """Scores become softcap * tanh(score / softcap); None: they are not capped."""
    sinks: torch.Tensor | None = None
    """[H]: one more score for each head, which has no value; None: there are none."""
    ahead: int = 0
    """How many keys behind its own a query attends to, too, as far as its sequence has them; then all tokens of a
    sequence are in the same call."""
    distance_bias: torch.Tensor | None = None
    """float32 [H, D], contiguous, finite: head h adds distance_bias[h, min(q - k, D - 1)] to the scaled score of a
    query at position q and a key at position k. None: nothing is added. Not together with a soft cap or `ahead`."""
    in_chunks: bool = False
    """Whether tokens are divided from position 0 on in chunks of `window` tokens, and a query attends to the keys of
    its own chunk alone."""

    def first_key(self, position: int) -> int:
        """The position of the first key that the query at a position attends to."""
        if self.window is None:
            return 0
        return position - position % self.window if self.in_chunks else max(0, position + 1 - self.window)


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """The queries of a step's sequences in one layer, and where the keys and values are to which they attend."""

    query: torch.Tensor
    """[T, H, KD]. Where values are in keys, it may be narrower than these: then their first numbers give the scores."""
    cache: CacheView
    query_start: torch.Tensor
    """int32 [B + 1]: sequence b has the rows query_start[b] to query_start[b + 1], which may be none; they are the last
    of its tokens. Rows of no sequence are zero in the result."""
    seq_lens: torch.Tensor
    """int32 [B]: the tokens of each sequence."""
    block_tables: torch.Tensor
    """int32 [B, W]: the blocks with each sequence's keys and values."""
    how: AttentionFeatures
    selected: torch.Tensor | None = None
    """int64 [T, W]: to which keys of its sequence each row attends, of those that it sees (key_selection.py), among
    them at least one. Not together with a soft cap, sinks or biases. None: to all."""
    work: StepWork | None = None
    """How the call is dealt to a GPU's programs. None: its lengths are read from the device."""
    shares: bool = True
    """Whether rows may attend together to blocks that they share."""
    most_rows: int = 128
    """The most rows that are computed in one tile."""
