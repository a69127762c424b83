"""The attention kernels on a GPU: what they compute, and that a row's bits depend on its own keys alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch

from baton.runner.backends.attention_call import AttentionCall, AttentionFeatures
from baton.runner.backends.paged_cache import CacheView
from baton.runner.backends.torch_operations import TorchOperations
from tests.support.triton_interpreter import DEVICE, triton_attention_module

ON_GPU = DEVICE.type == "cuda"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16} if ON_GPU else {"float32": torch.float32}
pytestmark = [
    pytest.mark.triton,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # exp of what is far too large, in the interpreter
    pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES),
]

LENGTHS = (1, 700, 1500, 333, 64, 2100) if ON_GPU else (1, 70, 131)
"""Keys of the sequences: the longest have several splits."""
LAST = max(LENGTHS) if ON_GPU else 6
"""How many of a sequence's last queries are computed."""
NEAR = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Kind:
    """One layer's shape and features."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    block_size: int = 16
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    in_chunks: bool = False

    def last_to_see(self, key: int, length: int) -> int:
        """The position behind that of the last query that sees a key."""
        if self.window is None:
            return length
        return (key // self.window + 1) * self.window if self.in_chunks else key + self.window


GPU_KINDS = {
    "llama": Kind(8, 2, 64, 64),
    "one head in a group": Kind(4, 4, 32, 32),
    "three heads in a group, window, blocks of 8": Kind(6, 2, 80, 80, block_size=8, window=37),
    "window, softcap and sinks": Kind(8, 1, 16, 16, block_size=32, window=100, softcap=20.0, has_sinks=True),
    "twenty heads in a group": Kind(20, 1, 64, 64, has_sinks=True),
    "deepseek": Kind(4, 4, 192, 128),
    "gemma4's global layers": Kind(8, 1, 512, 512),
    "window of several tiles": Kind(16, 2, 128, 128, block_size=64, window=600, has_sinks=True),
    "chunks of several tiles": Kind(16, 2, 128, 128, block_size=64, window=600, in_chunks=True),
    "small chunks": Kind(6, 2, 80, 80, block_size=8, window=37, in_chunks=True),
}
SMALL_KINDS = {
    "four heads in a group": Kind(4, 1, 64, 64),
    "three heads in a group, window, blocks of 8": Kind(3, 1, 80, 80, block_size=8, window=11),
    "deepseek": Kind(1, 1, 192, 128),
    "gemma4's global layers": Kind(1, 1, 512, 512),
    "small chunks": Kind(3, 1, 80, 80, block_size=8, window=11, in_chunks=True),
}
KINDS = GPU_KINDS if ON_GPU else SMALL_KINDS
"""For the interpreter a few heads: it takes some milliseconds for each of them in each split. Other features are in
test_triton_tiles.py."""


class Sequences:
    """Queries, keys and values of sequences of LENGTHS, in blocks in an order that a seed decides, amid NaN."""

    def __init__(self, kind: Kind, dtype: torch.dtype, order: int = 0) -> None:
        self._kind = kind
        generator = torch.Generator().manual_seed(1)
        sizes = [-(-length // kind.block_size) for length in LENGTHS]
        places = torch.randperm(sum(sizes) + 3, generator=torch.Generator().manual_seed(order))[: sum(sizes)] + 1
        key_numbers, value_numbers = (
            kind.num_kv_heads * kind.block_size * dim for dim in (kind.key_dim, kind.value_dim)
        )
        memory = torch.full((sum(sizes) + 4, key_numbers + value_numbers), torch.nan)
        self._tables = torch.zeros(len(LENGTHS), max(sizes), dtype=torch.int32)
        self._queries = []
        self._values = memory[:, key_numbers:].view(-1, kind.num_kv_heads, kind.block_size, kind.value_dim)
        keys = memory[:, :key_numbers].view(-1, kind.num_kv_heads, kind.block_size, kind.key_dim)
        for sequence, (length, own) in enumerate(zip(LENGTHS, torch.split(places, sizes), strict=True)):
            self._tables[sequence, : own.numel()] = own
            for view in (keys, self._values):
                rows = torch.randn(
                    own.numel() * kind.block_size, kind.num_kv_heads, view.shape[-1], generator=generator
                )
                rows[length:] = torch.nan  # memory that nothing was written to
                view[own] = rows.view(own.numel(), kind.block_size, *rows.shape[1:]).transpose(1, 2)
            query = torch.randn(length, kind.num_heads, kind.key_dim, generator=generator)
            self._queries.append(query.to(DEVICE, dtype))
        self._memory = memory
        self._view: dict[str, Any] = {
            "num_blocks": memory.shape[0],
            "block_stride": memory.shape[1],
            "key_offset": 0,
            "value_offset": key_numbers,
            "num_kv_heads": kind.num_kv_heads,
            "block_size": kind.block_size,
            "key_dim": kind.key_dim,
            "value_dim": kind.value_dim,
        }
        sinks = torch.randn(kind.num_heads, generator=generator).to(DEVICE, dtype) if kind.has_sinks else None
        self._how = AttentionFeatures(kind.key_dim**-0.5, kind.window, kind.softcap, sinks, in_chunks=kind.in_chunks)

    def spoil(self, sequence: int, key: int, number: float) -> None:
        """Replace the values of one key."""
        block = self._tables[sequence, key // self._kind.block_size]
        self._values[block, :, key % self._kind.block_size] = number

    def attend(self, spans: Sequence[tuple[int, int, int]], attend: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        """Compute one step of the queries `first` to before `stop` of some sequences: (sequence, first, stop)."""
        counts = [stop - first for _, first, stop in spans]
        query = torch.cat([self._queries[sequence][first:stop] for sequence, first, stop in spans])
        call = AttentionCall(
            query,
            CacheView(memory=self._memory.flatten().to(DEVICE, query.dtype), **self._view),
            torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=DEVICE),
            torch.tensor([stop for _, _, stop in spans], dtype=torch.int32, device=DEVICE),
            self._tables[[sequence for sequence, _, _ in spans]].to(DEVICE),
            self._how,
        )
        return list(torch.split(attend(call), counts))


@pytest.fixture(params=list(KINDS.values()), ids=list(KINDS))
def kind(request: pytest.FixtureRequest) -> Kind:
    chosen: Kind = request.param
    return chosen


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Callable[..., torch.Tensor]:
    attend: Callable[..., torch.Tensor] = triton_attention_module(monkeypatch).triton_attention
    return attend


Alone = Callable[[Kind, torch.dtype], list[torch.Tensor]]
LAST_SPANS = [(sequence, max(0, length - LAST), length) for sequence, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def alone() -> Iterator[Alone]:
    """The rows of the last queries of every sequence, at once in a step of its own; computed once for each kind."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        kernel = triton_attention_module(monkeypatch).triton_attention

        @cache
        def compute(kind: Kind, dtype: torch.dtype) -> list[torch.Tensor]:
            sequences = Sequences(kind, dtype)
            return [sequences.attend([span], kernel)[0] for span in LAST_SPANS]

        yield compute


def test_results_are_those_of_plain_attention(kind: Kind, dtype: torch.dtype, alone: Alone) -> None:
    sequences = Sequences(kind, dtype)
    plain = TorchOperations(1).paged_attention
    for (sequence, first, stop), out in zip(LAST_SPANS, alone(kind, dtype), strict=True):
        for row in {first, (first + stop) // 2, stop - 1}:
            (expected,) = sequences.attend([(sequence, row, row + 1)], plain)
            torch.testing.assert_close(out[row - first][None], expected, atol=NEAR[dtype], rtol=NEAR[dtype])


def test_mates_and_the_places_of_blocks_change_no_bits(
    kind: Kind, dtype: torch.dtype, kernel: Any, alone: Alone
) -> None:
    expected = alone(kind, dtype)
    together = Sequences(kind, dtype, order=1).attend(LAST_SPANS, kernel)
    assert all(map(torch.equal, together, expected))


@pytest.mark.parametrize("chunk", [1, 7, 100] if ON_GPU else [4])
def test_chunks_change_no_bits(kind: Kind, dtype: torch.dtype, kernel: Any, alone: Alone, chunk: int) -> None:
    sequences, expected = Sequences(kind, dtype), alone(kind, dtype)
    before = {sequence: first for sequence, first, _ in LAST_SPANS}
    number = 30 if ON_GPU else 2
    done = {sequence: max(first, stop - number * chunk) for sequence, first, stop in LAST_SPANS}
    while done:
        spans = [(s, first, min(first + chunk, LENGTHS[s])) for s, first in done.items()]
        for (sequence, first, stop), out in zip(spans, sequences.attend(spans, kernel), strict=True):
            assert torch.equal(out, expected[sequence][first - before[sequence] : stop - before[sequence]])
        done = {sequence: stop for sequence, _, stop in spans if stop < LENGTHS[sequence]}


@pytest.mark.parametrize("number", [float("nan"), float("inf")] if ON_GPU else [float("inf")])
def test_a_value_that_is_not_finite_spoils_only_rows_that_see_it(
    kind: Kind, dtype: torch.dtype, kernel: Any, number: float
) -> None:
    sequence, key = (1, 601) if ON_GPU else (1, 67)
    sequences = Sequences(kind, dtype)
    span = LAST_SPANS[sequence]
    (expected,) = sequences.attend([span], kernel)
    sequences.spoil(sequence, key, number)
    (out,) = sequences.attend([span], kernel)
    first, stop = key - span[1], kind.last_to_see(key, LENGTHS[sequence]) - span[1]
    assert torch.equal(out[:first], expected[:first])
    assert not out[first:stop].isfinite().any()
    assert torch.equal(out[stop:], expected[stop:])
