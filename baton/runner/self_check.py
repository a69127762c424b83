"""The check at start whether a model computes numbers, and the same in every batch; takes well under a second.

One sequence is computed at once, and again in chunks beside another sequence, with the node's own weights, shapes and
threads; keys, values and logits must have the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from baton.engine.batch import NewRequestData
from baton.messages.sampling import SamplingParams
from baton.runner.execution.input_batch import flatten
from baton.runner.execution.request_table import RequestState
from baton.runner.model.stored.weight import UnusableWeight
from baton.runner.model.transformer import Transformer
from baton.runner.model.weights import LoadedModel

TOO_SMALL = "the cache is too small for the check at start"
DIFFERENT_IN_CHUNKS = "the check at start found different bits for a sequence computed at once and in chunks"
_CHUNKS = (1, 9, 1, 6, 1, 1)
_MATE_CHUNKS = (5, 1, 11, 1, 1, 1)
"""The tokens of both sequences in each step (see `_CHUNKS`); the last steps decode."""


def why_not_bit_exact(loaded: LoadedModel, transformer: Transformer) -> str | None:
    """None when the model computes each row from that row's history alone; otherwise the reason why it does not.

    Raises UnusableWeight if it computes logits that are not finite, so that no request could be answered.
    """
    return why_missed(transformer.missed_products) or _compare(
        transformer, loaded.config.vocab_size, loaded.max_model_len
    )


def _compare(transformer: Transformer, vocab_size: int, max_model_len: int) -> str | None:
    length, mate_length = min(sum(_CHUNKS), max_model_len), min(sum(_MATE_CHUNKS), max_model_len)
    blocks, mate_blocks = block_count(transformer, length), block_count(transformer, mate_length)
    if transformer.num_blocks < 1 + 2 * blocks + mate_blocks:
        return TOO_SMALL
    tokens = check_tokens(length, vocab_size)
    mate_tokens = [(104729 * (position + 1)) % vocab_size for position in range(mate_length)]
    at_once = check_state("whole", tokens, 1, blocks)
    parts = check_state("parts", tokens, 1 + blocks, blocks)
    mate = check_state("mate", mate_tokens, 1 + 2 * blocks, mate_blocks)
    expected = _advance(transformer, [(at_once, length)])[0]
    require_finite(expected, "logits")
    logits = expected
    for count, mate_count in zip(_CHUNKS, _MATE_CHUNKS, strict=True):
        shares = [(mate, mate_count), (parts, count)]
        # Chunks are shortened to the maximum length of a tiny model.
        fitting = [(state, min(n, len(state.token_ids) - state.num_computed_tokens)) for state, n in shares]
        logits = _advance(transformer, [share for share in fitting if share[1] > 0])[-1]
        if parts.num_computed_tokens == length:
            break
    same_kv = bool((_kv(transformer, at_once) == _kv(transformer, parts)).all())
    transformer.clear_blocks(1 + 2 * blocks + mate_blocks)
    if not same_kv or not np.array_equal(expected.view(np.uint32), logits.view(np.uint32)):
        return DIFFERENT_IN_CHUNKS
    return None


def why_missed(products: Iterable[str]) -> str | None:
    """Why a model that computes these products of torch's is not bit-exact; None if there are none."""
    names = ", ".join(sorted(products))
    return f"computes {names} outside of Baton's kernels" if names else None


def require_finite(numbers: npt.NDArray[np.float32], kind: str) -> None:
    """Raise UnusableWeight if a model gives numbers of this kind that are not finite."""
    if not np.isfinite(numbers).all():
        raise UnusableWeight(f"they give {kind} that are not finite: they or config.json are damaged; copy them again")


def check_tokens(count: int, vocab_size: int) -> list[int]:
    """The tokens of a sequence that a check at start computes."""
    return [(7919 * (position + 1)) % vocab_size for position in range(count)]


def block_count(transformer: Transformer, num_tokens: int) -> int:
    """How many blocks a sequence of so many tokens needs, of all groups of layers."""
    return -(-num_tokens // transformer.layout.block_size) * len(transformer.layout.groups)


def check_state(name: str, tokens: Sequence[int], first_block: int, blocks: int) -> RequestState:
    """A sequence in consecutive blocks, of which nothing is computed."""
    block_ids = range(first_block, first_block + blocks)
    return RequestState(NewRequestData(name, list(tokens), (), SamplingParams(), block_ids, 0))


def _advance(transformer: Transformer, shares: list[tuple[RequestState, int]]) -> list[npt.NDArray[np.float32]]:
    """Compute one step; returns the last row's logits of every share."""
    scheduled = [state.share(count) for state, count in shares]
    batch = flatten(scheduled, transformer.layout, transformer.row_quantum)
    # Where all of them sample, the last layer computes only these rows: that path is checked, too.
    all_sample = all(share.samples for share in scheduled)
    logits = transformer.compute(batch, None if all_sample else batch.query_start[1:].astype(np.int64) - 1)
    for share in scheduled:
        share.state.num_computed_tokens = share.stop
    return list(logits)


def _kv(transformer: Transformer, state: RequestState) -> npt.NDArray[np.uint8]:
    import torch

    blocks = transformer.kv_cache.view(transformer.num_blocks, -1)[state.block_table.tolist()]
    return blocks.view(torch.uint8).cpu().numpy()
