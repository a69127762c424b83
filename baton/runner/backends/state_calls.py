"""What layers that keep a state are asked for: convolutions and recurrences over the rows of a step's sequences.

A layer without attention carries what it knows of a sequence in a state of fixed size. The state behind token p lies in
the block of the stripe that p belongs to; a block so keeps the state behind the last token of its stripe that was
computed, and a full one that behind the stripe's last token. A call reads the state behind the token before its first
row, from the block of that token's stripe; at the begin of a sequence the state is zero. It writes the state to the
block of each stripe that ends among its rows, and to that of its last row; rows that are drafts do not count. It may
read and write the same block. Where a table has the null block, 0, nothing is written, since nobody keeps that
snapshot, and nothing can be read. No sequence of a step reads or writes a block to which another one writes.

States are float32, whatever the dtype of rows. All arithmetic of a row is in one order that depends on nothing but the
tokens before it: tokens are processed one after the other, so that no bit depends on where chunks end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True, slots=True, eq=False)
class StateView:
    """One layer's states, or a part of each of them, in all blocks of a cache."""

    memory: torch.Tensor
    """The whole cache as float32, one dimension."""
    num_blocks: int
    block_stride: int
    """Numbers from the begin of a block to that of the next one."""
    offset: int
    """Where the state begins in its block, in numbers."""
    shape: tuple[int, ...]
    """[K - 1, W] of a convolution, oldest row first; [H, DK, DV] of a recurrence."""
    block_size: int
    """Tokens in a stripe."""
    row_stride: int | None = None
    """Numbers from one row of a convolution to the next one, where a view has some of the columns; None: W."""


@dataclass(frozen=True, slots=True, eq=False)
class StateStep:
    """Which rows and blocks a step's sequences have. Rows behind the last sequence's rows are padding."""

    query_start: torch.Tensor
    """int32 [B + 1]: sequence b has the rows query_start[b] to query_start[b + 1]; they are the last of its tokens."""
    seq_lens: torch.Tensor
    """int32 [B]: the tokens of each sequence, those of this step included."""
    kept_lens: torch.Tensor
    """int32 [B]: how many of them the states that are written may cover; the rows behind them (drafts) are computed,
    and no state is written of them."""
    block_tables: torch.Tensor
    """int32 [B, stripes]: the block of each stripe of a sequence. Only those that are read or written must be there."""


@dataclass(frozen=True, slots=True, eq=False)
class ConvolutionCall:
    """A causal convolution of each column over the tokens of a sequence: row t is
    activation(bias + sum_j weight[:, j] * x[t - K + 1 + j]), with zeros before the first token."""

    rows: torch.Tensor
    """x: [T, W] in float32 or bfloat16, each row contiguous; the result has this shape and dtype, zero in padding."""
    weight: torch.Tensor
    """float32 [W, K], contiguous; K is at least 2."""
    bias: torch.Tensor | None
    """float32 [W], or None."""
    activation: Literal["silu"] | None
    state: StateView
    """[K - 1, W]: the rows x before."""
    step: StateStep


@dataclass(frozen=True, slots=True, eq=False)
class RecurrenceCall:
    """A linear recurrence over the tokens of a sequence, for each head h with the state S [DK, DV]:

        S = exp(decay) * S            (each row of S by its own decay where there is one for each)
        u = beta * (v - kᵀ S)         with the delta rule, otherwise beta * v; without beta v itself
        S = S + k uᵀ
        out = qᵀ S + skip * v         skip only where it is given

    q and k are first divided by sqrt(their squares' sum + norm_eps) where that is given, and q is multiplied by scale.
    """

    query: torch.Tensor
    """[T, G, DK] in float32 or bfloat16, each row contiguous; head h has the query and key h // (H / G)."""
    key: torch.Tensor
    """[T, G, DK], as the query."""
    value: torch.Tensor
    """[T, H, DV], as the query."""
    decay: torch.Tensor
    """float32 [T, H] or [T, H, DK], contiguous: logarithms of factors."""
    beta: torch.Tensor | None
    """float32 [T, H], contiguous."""
    scale: float
    norm_eps: float | None
    state: StateView
    """[H, DK, DV]; DK and DV are at most 512."""
    step: StateStep
    has_delta_rule: bool = True
    """Only where beta is given."""
    skip: torch.Tensor | None = None
    """float32 [H], contiguous."""
    rates: torch.Tensor | None = None
    """float32 [DK, H], contiguous: what decay [T, H] is multiplied by for each row of a head's state.

    Only without norm_eps and the delta rule, where each head has one value (DV = 1) and all share one query and key.
    """
