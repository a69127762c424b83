"""The selection of the keys that each row attends to, by scores that queries and keys of their own give.

The rule is that of DeepSeek-V3.2's indexer (arXiv 2512.02556, section 2.1): the score of a row and a key is the sum
over heads of weight * max(0, scale * query * key), and a row attends to the keys with the largest scores. Of equal
scores the earlier key counts more, and NaN less than all, so that a selection depends on nothing but the row and its
sequence. It is bits, 64 in a word: bit j of word w of a row stands for the key at position 64 w + j.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from baton.runner.backends.paged_cache import CacheView, read_blocks

WORD_BITS = 64


@dataclass(frozen=True, slots=True, eq=False)
class SelectionCall:
    """The rows of a step's sequences in one layer, and where the keys are that give scores with them."""

    query: torch.Tensor
    """[T, H, D]"""
    weights: torch.Tensor
    """float32 [T, H]: what a head's score counts."""
    cache: CacheView
    """One whose tokens have one key each."""
    first: int
    """The D numbers from here on of each key in the cache give the scores."""
    query_start: torch.Tensor
    """int32 [B + 1], as in AttentionCall."""
    seq_lens: torch.Tensor
    """int32 [B]"""
    block_tables: torch.Tensor
    """int32 [B, W]"""
    scale: float
    most: int
    """How many keys a row attends to at most."""

    @property
    def num_words(self) -> int:
        """The words of a row's selection."""
        return num_words_of(self.seq_lens)


def num_words_of(seq_lens: torch.Tensor) -> int:
    """The words of a row's selection in a step with sequences of these lengths, int32 [B]."""
    longest = int(seq_lens.max()) if seq_lens.numel() else 0
    return max(1, -(-longest // WORD_BITS))


def positions_in(words: torch.Tensor) -> torch.Tensor:
    """The positions int64 [N], in order, whose bits are set in the words [W] of a row."""
    bits = words[:, None] >> torch.arange(WORD_BITS, device=words.device) & 1
    return bits.flatten().nonzero().flatten()


def words_of(positions: torch.Tensor, num_words: int) -> torch.Tensor:
    """The words int64 [W] of a row that has selected these positions [N]."""
    bits = torch.zeros(num_words * WORD_BITS, dtype=torch.int64, device=positions.device)
    bits[positions] = 1
    return (bits.view(num_words, WORD_BITS) << torch.arange(WORD_BITS, device=positions.device)).sum(1)


def select_by_torch(call: SelectionCall) -> torch.Tensor:
    """The selection int64 [T, W] of every row, each computed alone."""
    width, out = call.query.shape[2], call.query.new_zeros(call.query.shape[0], call.num_words, dtype=torch.int64)
    starts: list[int] = call.query_start.tolist()
    for sequence, length in enumerate(call.seq_lens.tolist()):
        first, last = starts[sequence], starts[sequence + 1]
        if first == last:
            continue
        blocks = call.block_tables[sequence, : -(-length // call.cache.block_size)].long()
        keys = read_blocks(call.cache, blocks, call.query.dtype)[0][0, :, call.first : call.first + width].float()
        for row in range(first, last):
            stop = length - (last - 1 - row)
            scores = torch.relu(call.query[row].float() @ keys[:stop].T.contiguous() * call.scale)
            sums = (call.weights[row] @ scores).nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
            order = torch.sort(sums, descending=True, stable=True).indices
            out[row] = words_of(order[: call.most], call.num_words)
    return out
