"""A row's bits depend on its own history alone: not on chunks, batch mates, cached prefixes or threads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt
import pytest
import torch

from baton.engine.batch import BlockCopy, NewRequestData, SchedulerOutput
from baton.messages.sampling import SamplingParams
from baton.runner.backends.kernel_choice import choose_operations
from baton.runner.backends.operations import Operations
from baton.runner.backends.paged_cache import keys_and_values, scales
from baton.runner.backends.torch_operations import TorchOperations
from baton.runner.execution.input_batch import FlatBatch, flatten
from baton.runner.execution.request_table import RequestState, Scheduled
from baton.runner.model import attention
from baton.runner.model.attention import cache_views
from baton.runner.model.mixtures import experts
from baton.runner.model.random_model import write_random_model
from baton.runner.model.transformer import Transformer
from baton.runner.model.weights import load_model
from baton.runner.parts import Shard
from baton.runner.self_check import why_not_bit_exact
from baton.runner.spec import CacheSpec, WeightSpec
from baton.runner.torch_threads import elementwise_threads
from tests.support.tiny_models import TINY_MODELS

BLOCK_SIZE = 16
LENGTH = 300
"""Long enough that torch splits elementwise work over two threads (from 32768 elements on)."""
LENGTH_IN_TORCH = 130
"""Enough for several windows, blocks and calls of torch's products, whose attention takes its time for each row."""
CACHED = 160
"""Tokens whose KV comes from a cached prefix, or from another runner."""
SHARED_BY_ALL = 64
"""Tokens that all sequences share which share any; some of them share CACHED."""
MOST_MATES = 31

ODD_WIDTHS = {**TINY_MODELS["llama"], "intermediate_size": 120, "head_dim": 24}
"""Widths that don't fill vectors: every tensor has a tail unless rows are padded."""
ODD_EXPERTS = {**TINY_MODELS["gpt_oss"], "intermediate_size": 248}
"""The same in a model whose experts torch activates."""
MODELS = {**TINY_MODELS, "llama_odd_widths": ODD_WIDTHS, "gpt_oss_odd_widths": ODD_EXPERTS}
KINDS = ("llama_odd_widths", "gemma3_text", "mixtral", "deepseek_v3", "gpt_oss_odd_widths")
"""Models with odd widths, windows, experts, keys wider than values, and sinks: in every dtype. The others have the same
kernels in other combinations, and each is computed in one dtype."""
CACHED_IN_8_BITS = ("llama_odd_widths", "gemma3_text", "deepseek_v3", "gpt_oss")
"""Models with odd widths, windows, keys wider than values, and sinks."""
DTYPES = ("float32", "bfloat16")

ONE_BY_ONE = (*[1] * 40, 200, 1)
"""Single tokens at the beginning, across two blocks and the bound of a window, and at the end, across a tile of keys.
"""
FEW_AND_MANY = (*[7] * 6, *[16] * 4, 64)
"""Steps of so few rows that the kernels have code of their own for them, and of more."""
AMONG_OTHERS = (77, 1, 1, 40, 9, 60)


def cases() -> list[tuple[str, str, str]]:
    """Model, dtype of the cache, dtype: each model, each dtype with each kind, each cache with each dtype."""
    found = [(name, "auto", dtype) for name in KINDS for dtype in DTYPES]
    others = [name for name in MODELS if name not in KINDS]
    found += [(name, "auto", DTYPES[place % 2]) for place, name in enumerate(others)]
    for place, name in enumerate(CACHED_IN_8_BITS):
        found += [(name, "int8", DTYPES[place % 2]), (name, "fp8", DTYPES[1 - place % 2])]
    return found


@dataclass(frozen=True)
class Bits:
    """The results of a sequence's computation: logits of every position and KV of every slot."""

    logits: npt.NDArray[np.float32]
    kv: torch.Tensor

    def equals(self, other: Bits) -> bool:
        return same_bits(self.logits, other.logits) and torch.equal(
            self.kv.view(torch.uint8), other.kv.view(torch.uint8)
        )


def same_bits(one: npt.NDArray[np.float32], other: npt.NDArray[np.float32]) -> bool:
    return np.array_equal(one.view(np.uint32), other.view(np.uint32))


class Run:
    """Computes sequences on one transformer, and keeps all of their logits."""

    def __init__(self, transformer: Transformer, vocab_size: int, length: int = LENGTH) -> None:
        self.transformer = transformer
        self._length = length
        self.kv_blocks = transformer.kv_cache.view(transformer.num_blocks, -1)
        self._next_block = 1
        self._rng = Random(7)
        self.adapters: dict[str, str] = {}
        """The digests of the sequences' adapters, by the sequences' names."""
        mates = {f"mate-{mate}": self._rng.randint(1, 120) for mate in range(MOST_MATES)}
        lengths = {"main": length, **mates}
        self._tokens = {name: [self._rng.randrange(vocab_size) for _ in range(n)] for name, n in lengths.items()}

    def state(self, name: str, shared: Sequence[int] = ()) -> RequestState:
        tokens = self._tokens[name]
        groups = len(self.transformer.layout.groups)
        blocks = [*shared, *self._blocks(-(-len(tokens) // BLOCK_SIZE) * groups - len(shared))]
        num_computed = len(shared) // groups * BLOCK_SIZE
        adapter = self.adapters.get(name, "")
        return RequestState(NewRequestData(name, tokens, (), SamplingParams(), blocks, num_computed, adapter=adapter))

    def mates(self, count: int) -> list[RequestState]:
        return [self.state(f"mate-{mate}") for mate in range(count)]

    def preempt(self, state: RequestState) -> None:
        """Take its blocks away; it computes everything again in others."""
        state.set_blocks(self._blocks(len(state.block_table)))
        state.num_computed_tokens = 0

    def swap(self, state: RequestState) -> None:
        """Copy its blocks out to the host tier, let others overwrite them, and copy them back into other ones."""
        device = state.block_table.tolist()
        host = self.transformer.host_blocks(1 + len(device))
        out = [BlockCopy(block, 1 + index) for index, block in enumerate(device)]
        host.execute(SchedulerOutput(0, [], [], {}, 0, blocks_to_swap_out=out))
        self.kv_blocks.view(torch.uint8)[device] = 0xFF  # NaN in every format
        state.set_blocks(self._blocks(len(device)))
        back = [BlockCopy(1 + index, block) for index, block in enumerate(state.block_table.tolist())]
        host.execute(SchedulerOutput(1, [], [], {}, 0, blocks_to_swap_in=back))

    def _blocks(self, count: int) -> list[int]:
        """Blocks that hold something else's KV: they are used in turns."""
        if self._next_block + count > self.transformer.num_blocks:
            self._next_block = 1
        self._next_block += count
        return list(range(self._next_block - count, self._next_block))

    def compute(
        self, main: RequestState, chunks: Sequence[int], mates: Sequence[RequestState] = (), until: int | None = None
    ) -> Bits:
        """Compute `main` in chunks (the last one repeats), each mate a random number of tokens a step beside it."""
        collected = []
        until = until or self._length
        for index in range(self._length):
            share = main.share(min(chunks[min(index, len(chunks) - 1)], until - main.num_computed_tokens))
            others = [state.share(self._left(state, self._rng.randint(1, 40))) for state in mates]
            place = self._rng.randint(0, len(others))
            step = [s for s in (*others[:place], share, *others[place:]) if s.count]
            batch = self._flatten(step)
            first = int(batch.query_start[step.index(share)])
            collected.append(self.transformer.compute(batch, np.arange(first, first + share.count)))
            self._commit(step)
            if main.num_computed_tokens == until:
                break
        return Bits(np.concatenate(collected), self._kv(main))

    def draw(self, main: RequestState, chunk: int) -> npt.NDArray[np.float32]:
        """Compute as an engine does: the logits of the last position alone, those before it skipped."""
        while True:
            step = [main.share(self._left(main, chunk))]
            logits = self.transformer.compute(self._flatten(step))
            self._commit(step)
            if main.num_computed_tokens == main.num_tokens:
                return logits
            assert logits.shape[0] == 0

    def step(self, states: Sequence[RequestState]) -> npt.NDArray[np.float32]:
        """Compute the next token of each sequence in one step; returns their logits."""
        step = [state.share(1) for state in states]
        batch = self._flatten(step)
        logits = self.transformer.compute(batch, np.arange(len(step)))
        self._commit(step)
        return logits

    def _flatten(self, step: Sequence[Scheduled]) -> FlatBatch:
        transformer = self.transformer
        return flatten(step, transformer.layout, transformer.row_quantum, transformer.adapters.slots)

    @staticmethod
    def _commit(step: Sequence[Scheduled]) -> None:
        for done in step:
            done.state.num_computed_tokens = done.stop

    @staticmethod
    def _left(state: RequestState, count: int) -> int:
        return min(count, len(state.token_ids) - state.num_computed_tokens)

    def _kv(self, state: RequestState) -> torch.Tensor:
        rows, layout = [], self.transformer.layout
        caches = cache_views(self.transformer.kv_cache, layout, Shard())
        for index, group in enumerate(layout.groups):
            blocks = state.block_table[index :: len(layout.groups)].tolist()
            for cache in (caches[layer] for layer in group.layers):
                views = [view.view(torch.int8) if layout.has_scales else view for view in keys_and_values(cache)]
                if layout.has_scales:
                    views += [scale.unsqueeze(-1).view(torch.int8) for scale in scales(cache)]
                for view in views:
                    by_token = view[blocks].transpose(1, 2).flatten(0, 1)
                    rows.append(by_token[: self._length].flatten(1))
        return torch.cat(rows, dim=1)


@pytest.fixture(autouse=True)
def _restore_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def load(
    models: Path,
    name: str,
    dtype: str,
    num_threads: int,
    operations: Operations | None = None,
    cache_dtype: str = "auto",
    length: int = LENGTH,
) -> tuple[Run, str | None]:
    directory = models / name
    if not directory.exists():
        write_random_model(directory, MODELS[name], seed=3)
    attention.register()
    experts.register()
    torch.set_num_threads(elementwise_threads(num_threads))
    loaded = load_model(directory, WeightSpec(dtype))
    chosen = operations or choose_operations(num_threads)
    transformer = Transformer(loaded, chosen, BLOCK_SIZE, CacheSpec(num_blocks=800, dtype=cache_dtype), num_threads)
    return Run(transformer, loaded.config.vocab_size, length), why_not_bit_exact(loaded, transformer)


def assert_interruptions_change_no_bit(run: Run, expected: Bits) -> tuple[list[int], Bits]:
    """Assert that the main sequence has its bits when it is preempted, swapped, or finds its prefix in the cache.

    Returns the cached blocks of the prefix, and the bits of what comes behind them.
    """
    preempted = run.state("main")
    run.compute(preempted, [50, 30], run.mates(2), until=CACHED + 37)
    run.preempt(preempted)
    assert run.compute(preempted, [128], run.mates(3)).equals(expected), "preempted and recomputed"

    swapped = run.state("main")
    run.compute(swapped, [50, 30], run.mates(2), until=CACHED + 37)
    run.swap(swapped)
    rest = Bits(expected.logits[CACHED + 37 :], expected.kv)
    assert run.compute(swapped, [40, *[1] * 12, 60], run.mates(3)).equals(rest), "swapped out and in"

    again = run.state("main")
    assert run.compute(again, [LENGTH]).equals(expected)
    tail = Bits(expected.logits[CACHED:], expected.kv)
    num_cached = CACHED // BLOCK_SIZE * len(run.transformer.layout.groups)
    cached = [int(block) for block in again.block_table[:num_cached]]
    assert run.compute(run.state("main", shared=cached), [50]).equals(tail), "with a cached prefix"
    return cached, tail


def assert_sharing_changes_no_bit(run: Run, cached: list[int], tail: Bits) -> None:
    """Assert that sequences have the main one's bits when they decode in one step behind the same cached blocks.

    They are at different positions, so that no two rows are the same, and share more and fewer blocks.
    """
    fewer = cached[: len(cached) * SHARED_BY_ALL // CACHED]
    states = [run.state("main", shared=blocks) for blocks in (cached, fewer, cached, cached, fewer)]
    for ahead, state in enumerate(states):
        run.compute(state, [LENGTH], until=CACHED + 7 * ahead + 1)
    for _ in range(12):
        at = [state.num_computed_tokens - CACHED for state in states]
        assert same_bits(run.step(states), tail.logits[at]), f"beside sequences that share blocks, {at[0]} behind them"


def assert_continued_alike(run: Run, other: Run, cached: list[int], tail: Bits) -> None:
    """Assert that another runner, which gets the blocks of a prefix, computes the bits of what comes behind them."""
    moved = other.state("main").block_table[: len(cached)].tolist()
    other.kv_blocks[moved] = run.kv_blocks[cached]
    chunks = [*[1] * 8, 112, 1]
    assert other.compute(other.state("main", shared=moved), chunks).equals(tail), "continued by another runner"
    assert_sharing_changes_no_bit(other, moved, tail)


@pytest.mark.parametrize(("name", "cache_dtype", "dtype"), cases())
def test_bits_depend_on_the_sequence_alone(models: Path, name: str, cache_dtype: str, dtype: str) -> None:
    run, reason = load(models, name, dtype, num_threads=1, cache_dtype=cache_dtype)
    assert reason is None
    first = run.state("main")
    expected = run.compute(first, [LENGTH])
    for chunks in (ONE_BY_ONE, FEW_AND_MANY):
        assert run.compute(run.state("main"), chunks).equals(expected), f"in chunks of {chunks}"
    for count in (1, 6, MOST_MATES):
        bits = run.compute(run.state("main"), AMONG_OTHERS, run.mates(count))
        assert bits.equals(expected), f"among {count} others"
    for chunk in (LENGTH, 41):
        assert same_bits(run.draw(run.state("main"), chunk), expected.logits[-1:]), f"drawn after chunks of {chunk}"

    cached, tail = assert_interruptions_change_no_bit(run, expected)
    assert_sharing_changes_no_bit(run, cached, tail)

    other, reason = load(models, name, dtype, num_threads=2, cache_dtype=cache_dtype)
    assert reason is None
    assert other.compute(other.state("main"), [LENGTH]).equals(expected), "on two threads"
    bits = other.compute(other.state("main"), [1, 200, 7, 33], other.mates(5))
    assert bits.equals(expected), "on two threads, in chunks"
    assert_continued_alike(run, other, cached, tail)


@pytest.mark.parametrize(
    ("name", "cache_dtype", "dtype"),
    [
        ("qwen3", "auto", "bfloat16"),
        ("llama_odd_widths", "auto", "float32"),
        ("gemma3_text", "auto", "float32"),
        ("gemma3_text", "int8", "bfloat16"),
        ("gemma3_text", "fp8", "float32"),
        ("qwen3_moe", "auto", "bfloat16"),
        ("gpt_oss", "auto", "bfloat16"),
        ("gpt_oss", "auto", "float32"),
    ],
)
def test_bits_depend_on_the_sequence_alone_without_kernels(
    models: Path, name: str, cache_dtype: str, dtype: str
) -> None:
    run, reason = load(
        models,
        name,
        dtype,
        num_threads=1,
        operations=TorchOperations(1),
        cache_dtype=cache_dtype,
        length=LENGTH_IN_TORCH,
    )
    assert reason is None
    expected = run.compute(run.state("main"), [LENGTH_IN_TORCH])
    assert run.compute(run.state("main"), [7, 93, 1, 1, 1, 27]).equals(expected)
    assert run.compute(run.state("main"), [57, 1, 40, 90], run.mates(6)).equals(expected)
    assert same_bits(run.draw(run.state("main"), 100), expected.logits[-1:])


def test_the_oracle_finds_one_flipped_bit(models: Path) -> None:
    run, _ = load(models, "llama", "bfloat16", num_threads=1)
    main = run.state("main")
    expected = run.compute(main, [LENGTH])
    block = int(main.block_table[2])
    run.kv_blocks[block].view(torch.int16)[5] ^= 1
    main.num_computed_tokens = CACHED
    assert not same_bits(run.compute(main, [50]).logits, expected.logits[CACHED:])
