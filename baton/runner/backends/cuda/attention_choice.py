"""Chooses how a GPU computes the attention of each kind of layer, by what the kernels give on random input.

A way is taken if it runs, gives the plain one's result, and gives a row the same bits alone and in a batch. Rows attend
to blocks that they share together (shared_splits.py) only if that gives the same bits, too:
  triton     kernels that follow the block tables (triton_attention.py)
  plain      row by row, as in TorchOperations: exact and slow; the only one that adds biases of distances
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from baton.runner.backends.attention_call import AttentionCall, AttentionFeatures
from baton.runner.backends.attention_work.dealing import LARGEST_TILE, SPLIT, TOGETHER_ROWS
from baton.runner.backends.attention_work.step_work import StepWork
from baton.runner.backends.cuda.shared_splits import find_shared_splits
from baton.runner.backends.cuda.trials import is_near, why_failed
from baton.runner.backends.paged_cache import CacheView, write_rows

_log = logging.getLogger(__name__)

_MOST_HEADS = TOGETHER_ROWS // 2
_TILES = (LARGEST_TILE, 16)
"""The most rows of a tile that are tried. Those of more rows are computed by other instructions."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """The properties of a layer that decide which ways its attention can be computed in."""

    dtype: torch.dtype
    cache_dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    block_size: int
    window: int | None
    in_chunks: bool
    softcap: float | None
    has_sinks: bool
    has_distance_bias: bool

    @classmethod
    def of(cls, call: AttentionCall) -> _Kind:
        query, cache, how = call.query, call.cache, call.how
        return cls(
            query.dtype,
            cache.memory.dtype,
            query.shape[1],
            cache.num_kv_heads,
            cache.key_dim,
            cache.value_dim,
            cache.block_size,
            how.window,
            how.in_chunks,
            how.softcap,
            how.sinks is not None,
            how.distance_bias is not None,
        )

    @property
    def may_share(self) -> bool:
        """Whether a tile has room for rows of several sequences, each of which sees all keys of a split."""
        return self.window is None and self.num_heads // self.num_kv_heads <= _MOST_HEADS


PagedAttention = Callable[[AttentionCall], torch.Tensor]
"""Computes a causal call without biases of distances, without reading from the device, in one order of summation for
every row.

Implemented by `triton_attention.triton_attention` and, for tests, by `tests.doubles.fake_attention`."""


class AttentionChoice:
    """The ways that the kinds of layers of one model take. Called from one thread."""

    def __init__(self, device: torch.device, attend: PagedAttention, plain: PagedAttention) -> None:
        self._device = device
        self._attend = attend
        self._plain = plain
        self._ways: dict[_Kind, str] = {}
        self._most_rows: dict[_Kind, int] = {}
        self._together: set[_Kind] = set()
        self.why_plain = ""
        """Why the latest kind of layer that takes the plain way does not take a faster one."""

    @property
    def ways(self) -> set[str]:
        """The ways that layers take, as far as they have been called."""
        return set(self._ways.values())

    @property
    def attends_together(self) -> bool:
        """Whether there are layers in which rows attend together to the blocks that they share."""
        return bool(self._together)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Compute `Operations.paged_attention`."""
        if call.how.ahead or call.cache.values_in_keys or call.selected is not None:
            # Only encoders look ahead, and Triton's kernel is causal. It does not read values of keys either.
            return self._plain(call)
        kind = _Kind.of(call)
        way = self._ways.get(kind)
        if way is None:
            way = self._ways[kind] = self._choose(kind)
        if way == "plain":
            return self._plain(call)
        return self._attend(replace(call, shares=kind in self._together, most_rows=self._most_rows[kind]))

    def _choose(self, kind: _Kind) -> str:
        if kind.has_distance_bias:
            self.why_plain = "Triton's kernel adds no biases to scores"
            return "plain"
        sample = _sample(kind, self._device)
        expected = self._plain(sample)
        for most_rows in _TILES:
            if not (reason := self._why_not(replace(sample, most_rows=most_rows), expected)):
                self._most_rows[kind] = most_rows
                if kind.may_share and self._shares(replace(sample, most_rows=most_rows)):
                    self._together.add(kind)
                return "triton"
            if most_rows != _TILES[-1]:
                _log.warning("attention has tiles of %d rows at most: %s", _TILES[-1], reason)
        self.why_plain = reason
        return "plain"

    def _why_not(self, sample: AttentionCall, expected: torch.Tensor) -> str:
        """Why the kernel is not taken with tiles of the sample's rows; empty if it is."""
        try:
            out = self._attend(sample)
            alone = [self._attend(_last_alone(sample, sequence)) for sequence in range(sample.seq_lens.shape[0])]
        except Exception as error:  # of torch, of Triton's compiler or of the driver: not on this device or this shape
            return why_failed(error)
        if not is_near(out, expected):
            return "the result of Triton's kernel differs from that of plain attention"
        if not torch.equal(out[sample.query_start[1:].long() - 1], torch.cat(alone)):
            return "Triton's kernel gives a row other bits alone than in a batch"
        return ""

    def _shares(self, sample: AttentionCall) -> bool:
        """Whether rows of the sample that share blocks have the same bits as without sharing."""
        shared = _sharers(sample)
        tables, lengths = shared.block_tables.cpu().numpy(), shared.seq_lens.cpu().numpy()
        sharing = find_shared_splits(tables, lengths, shared.cache.block_size)
        assert sharing is not None
        work = StepWork(shared.query_start.cpu().numpy(), lengths, self._device, sharing)
        try:
            together = self._attend(replace(shared, work=work))
            if torch.equal(together, self._attend(shared)):
                return True
            reason = "a row gets other bits"
        except Exception as error:  # as above
            reason = why_failed(error)
        _log.warning("rows don't attend together to the blocks that they share: %s", reason)
        return False


_ONE_SPLIT, _THREE_SPLITS = 300, 1100
"""Numbers of keys of sequences."""


def _sample_sequences(kind: _Kind, device: torch.device) -> list[tuple[int, int]]:
    """The keys and the queries of the sample's sequences: the last one's fill more than one tile of 16 rows.

    On a GPU there are some for each larger tile, whose rows are just too many for the next smaller one, in one split
    and in several: so all kernels are compiled and compared before a request comes.
    """
    sequences = [(3, 3), (40, 1)]
    if device.type == "cuda":
        heads = 1 << (kind.num_heads // kind.num_kv_heads - 1).bit_length()
        for smaller in (16, LARGEST_TILE // 2):
            queries = smaller // heads + 1
            sequences += [(_ONE_SPLIT, queries), (_THREE_SPLITS, queries)]
    return [*sequences, (_THREE_SPLITS, 18)]


def _sample(kind: _Kind, device: torch.device) -> AttentionCall:
    """A call with random input, with shuffled blocks."""
    generator = torch.Generator().manual_seed(0)
    sample_lengths, sample_queries = zip(*_sample_sequences(kind, device), strict=True)
    width = -(-max(sample_lengths) // kind.block_size)
    num_blocks = len(sample_lengths) * width + 1
    keys, values = (kind.num_kv_heads * kind.block_size * dim for dim in (kind.key_dim, kind.value_dim))
    has_scales = kind.cache_dtype != kind.dtype
    scales = 4 * kind.num_kv_heads * kind.block_size if has_scales else 0  # bfloat16, of keys and of values
    cache = CacheView(
        memory=torch.zeros(num_blocks * (keys + values + scales), dtype=kind.cache_dtype, device=device),
        num_blocks=num_blocks,
        block_stride=keys + values + scales,
        key_offset=0,
        value_offset=keys,
        num_kv_heads=kind.num_kv_heads,
        block_size=kind.block_size,
        key_dim=kind.key_dim,
        value_dim=kind.value_dim,
        scale_offset=keys + values if has_scales else None,
    )
    places = torch.arange(num_blocks * kind.block_size, device=device)
    key, value = (
        torch.randn(places.numel(), kind.num_kv_heads, dim, generator=generator).to(device, kind.dtype)
        for dim in (kind.key_dim, kind.value_dim)
    )
    write_rows(cache, key, value, places // kind.block_size, places % kind.block_size)
    query = torch.randn(sum(sample_queries), kind.num_heads, kind.key_dim, generator=generator).to(device, kind.dtype)
    tables = torch.randperm(num_blocks - 1, generator=generator).view(-1, width).to(device, torch.int32) + 1
    starts = torch.tensor([0, *itertools.accumulate(sample_queries)], dtype=torch.int32, device=device)
    lengths = torch.tensor(sample_lengths, dtype=torch.int32, device=device)
    sinks = torch.randn(kind.num_heads, generator=generator).to(device, kind.dtype) if kind.has_sinks else None
    how = AttentionFeatures(kind.key_dim**-0.5, kind.window, kind.softcap, sinks, in_chunks=kind.in_chunks)
    return AttentionCall(query, cache, starts, lengths, tables, how)


def _last_alone(sample: AttentionCall, sequence: int) -> AttentionCall:
    """The last row of a sequence of the sample as the only one of a step."""
    last = int(sample.query_start[sequence + 1]) - 1
    return replace(
        sample,
        query=sample.query[last : last + 1],
        query_start=sample.query_start[:2].clamp(max=1),
        seq_lens=sample.seq_lens[sequence : sequence + 1],
        block_tables=sample.block_tables[sequence : sequence + 1],
    )


def _sharers(sample: AttentionCall) -> AttentionCall:
    """Decode rows of three sequences that begin with the blocks of the sample's last one, and see all of a split."""
    device, lengths = sample.query.device, [sample.seq_lens[-1], SPLIT, 2 * SPLIT + 6]
    return replace(
        sample,
        query=sample.query[-3:],
        query_start=torch.arange(4, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        block_tables=sample.block_tables[-1:].expand(3, -1).contiguous(),
    )
