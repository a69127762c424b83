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

from baton.engine.outputs import NewRequestData
from baton.engine.request import SamplingParams
from baton.engine.runner import attention, layers
from baton.engine.runner.attention import cache_views
from baton.engine.runner.input_batch import RequestState, Scheduled, flatten
from baton.engine.runner.kernel_choice import choose_operations
from baton.engine.runner.random_model import write_random_model
from baton.engine.runner.self_check import why_not_bit_exact
from baton.engine.runner.torch_operations import keys_and_values
from baton.engine.runner.transformer import CacheSize, Transformer, elementwise_threads
from baton.engine.runner.weights import load_model
from tests.support.tiny_models import TINY_MODELS

BLOCK_SIZE = 16
LENGTH = 300
"""Long enough that torch splits elementwise work over two threads (from 32768 elements on)."""
MATES = {"mate-1": 33, "mate-2": 130}

ODD_WIDTHS = {**TINY_MODELS["llama"], "intermediate_size": 120, "head_dim": 24}
"""Widths that don't fill vectors: every tensor has a tail unless rows are padded."""
THREADED = ("llama_odd_widths", "gemma3_text", "mixtral", "gpt2")
"""Computed with two threads as well: one for each kind of layer and activation."""
MODELS = {**TINY_MODELS, "llama_odd_widths": ODD_WIDTHS}


@dataclass(frozen=True)
class Bits:
    """All that a sequence's computation left: logits of every position, KV of every slot."""

    logits: npt.NDArray[np.float32]
    kv: torch.Tensor

    def equals(self, other: Bits) -> bool:
        same_logits = np.array_equal(self.logits.view(np.uint32), other.logits.view(np.uint32))
        return same_logits and torch.equal(self.kv.view(torch.uint8), other.kv.view(torch.uint8))


class Run:
    """Computes sequences on one transformer, all of their logits kept."""

    def __init__(self, transformer: Transformer, vocab_size: int) -> None:
        self.transformer = transformer
        self._next_block = 1
        rng = Random(7)
        lengths = {"main": LENGTH, **MATES}
        self._tokens = {name: [rng.randrange(vocab_size) for _ in range(n)] for name, n in lengths.items()}

    def state(self, name: str, shared: Sequence[int] = ()) -> RequestState:
        tokens = self._tokens[name]
        own = -(-len(tokens) // BLOCK_SIZE) - len(shared)
        blocks = [*shared, *range(self._next_block, self._next_block + own)]
        self._next_block += own
        return RequestState(NewRequestData(name, tokens, (), SamplingParams(), blocks, len(shared) * BLOCK_SIZE))

    def compute(
        self, main: RequestState, chunks: Sequence[int], mates: Sequence[RequestState] = (), mate: int = 7
    ) -> Bits:
        """Compute `main` in chunks (the last one repeats), each mate `mate` tokens a step beside it."""
        collected = []
        for index in range(LENGTH):
            share = Scheduled(main, self._left(main, chunks[min(index, len(chunks) - 1)]))
            others = [Scheduled(state, self._left(state, mate)) for state in mates]
            step = [s for s in (*others[:1], share, *others[1:]) if s.count]
            batch = flatten(step, BLOCK_SIZE, self.transformer.row_quantum)
            first = int(batch.query_start[step.index(share)])
            collected.append(self.transformer.compute(batch, np.arange(first, first + share.count)))
            for done in step:
                done.state.num_computed_tokens = done.stop
            if main.num_computed_tokens == LENGTH:
                break
        return Bits(np.concatenate(collected), self._kv(main))

    @staticmethod
    def _left(state: RequestState, count: int) -> int:
        return min(count, len(state.token_ids) - state.num_computed_tokens)

    def _kv(self, state: RequestState) -> torch.Tensor:
        rows = []
        for cache in cache_views(self.transformer.kv_cache, self.transformer.layout):
            for view in keys_and_values(cache):
                by_token = view[state.block_table.tolist()].transpose(1, 2).flatten(0, 1)
                rows.append(by_token[:LENGTH].flatten(1))
        return torch.cat(rows, dim=1)


@pytest.fixture(autouse=True)
def _restore_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def load(models: Path, name: str, dtype: str, num_threads: int) -> tuple[Run, str | None]:
    directory = models / name
    if not directory.exists():
        write_random_model(directory, MODELS[name], seed=3)
    attention.register()
    layers.register()
    torch.set_num_threads(elementwise_threads(num_threads))
    loaded = load_model(directory, dtype)
    transformer = Transformer(
        loaded, choose_operations(num_threads), BLOCK_SIZE, CacheSize(num_blocks=400), num_threads
    )
    return Run(transformer, loaded.config.vocab_size), why_not_bit_exact(loaded, transformer)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_bits_depend_on_the_sequence_alone(models: Path, name: str, dtype: str) -> None:
    at_once: dict[int, Bits] = {}
    for num_threads in (1, 2) if name in THREADED else (1,):
        run, reason = load(models, name, dtype, num_threads)
        assert reason is None
        first = run.state("main")
        expected = at_once[num_threads] = run.compute(first, [LENGTH])
        cached = list(first.block_table[:9])
        ways = {
            "chunks of 64": run.compute(run.state("main"), [64]),
            "chunks of 16": run.compute(run.state("main"), [220, 16]),
            "chunks of 7": run.compute(run.state("main"), [272, 7]),
            "token by token": run.compute(run.state("main"), [291, 1]),
            "with mates": run.compute(run.state("main"), [77], [run.state(mate) for mate in MATES], mate=31),
            "decoding beside prefills": run.compute(run.state("main"), [295, 1], [run.state("mate-2")], mate=27),
        }
        assert {way for way, bits in ways.items() if not bits.equals(expected)} == set()
        tail = run.compute(run.state("main", shared=cached), [50])
        assert tail.equals(Bits(expected.logits[9 * BLOCK_SIZE :], expected.kv))
    assert all(bits.equals(at_once[1]) for bits in at_once.values())
