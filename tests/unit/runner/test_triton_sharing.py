"""On a GPU decode rows attend together to blocks that they share, with the bits that each row has alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import pytest
import torch

from baton.runner.backends.attention_call import AttentionCall, AttentionFeatures
from baton.runner.backends.attention_work import dealing
from baton.runner.backends.attention_work.dealing import Int32Array
from baton.runner.backends.attention_work.step_work import StepWork
from baton.runner.backends.cuda.shared_splits import find_shared_splits
from baton.runner.backends.paged_cache import CacheView
from tests.support.triton_interpreter import DEVICE, SPLIT, triton_attention_module

pytestmark = [
    pytest.mark.triton,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # exp of what is far too large, in the interpreter
]

BLOCK = 16


@dataclass(frozen=True)
class Kind:
    """One layer's shape and features."""

    num_heads: int
    num_kv_heads: int
    dim: int
    dtype: torch.dtype = torch.float32
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False


KINDS = {
    "groups of 1": Kind(1, 1, 128),
    "groups of 1, bfloat16, sinks": Kind(2, 2, 64, torch.bfloat16, has_sinks=True),
    "groups of 3, softcap and sinks": Kind(3, 1, 80, softcap=20.0, has_sinks=True),
    "groups of 4": Kind(4, 1, 64),
    "groups of 4, bfloat16, softcap": Kind(4, 1, 128, torch.bfloat16, softcap=20.0),
    "groups of 8": Kind(8, 1, 64, has_sinks=True),
    "groups of 8, bfloat16": Kind(8, 1, 128, torch.bfloat16),
}
FEW_KINDS = ("groups of 1, bfloat16, sinks", "groups of 3, softcap and sinks")
"""For the interpreter, which takes seconds for each: all features. The tests below have the other groups."""


@dataclass(frozen=True)
class Member:
    """A sequence of a step: the length of its beginning that it has from another one, and its own length."""

    length: int
    parent: int = 0
    same: int = 0


TREE = (
    Member(40),
    Member(2 * SPLIT + 40),
    Member(2 * SPLIT, 1, 2 * SPLIT),
    Member(1),
    Member(2 * SPLIT + 1, 1, 2 * SPLIT),
    Member(2 * SPLIT - 5),
    Member(2 * SPLIT - 6, 5, SPLIT + 2 * BLOCK),  # of its second split only the beginning
    Member(SPLIT + 1, 5, SPLIT),
    Member(2 * SPLIT + 9, 1, 2 * SPLIT),
    Member(SPLIT + 33, 5, SPLIT // 2),
    Member(SPLIT, 1, SPLIT - BLOCK),  # not the last block of the split
    Member(3 * SPLIT, 8, 2 * SPLIT),
)
"""Five sequences share two splits, and three others one."""
PAIR = (Member(2 * SPLIT + 40), Member(2 * SPLIT + 1, 0, 2 * SPLIT))
NEVER_SHARING = {
    "groups of 16": (Kind(16, 1, 64), PAIR),
    "groups of 16, bfloat16": (Kind(16, 1, 128, torch.bfloat16), TREE),
    "a window": (Kind(4, 1, 64, window=SPLIT + 20), TREE),
}
"""Layers whose rows each attend alone, and sequences that could share."""


class Step:
    """A decode step of sequences, with random content in all blocks that any of them has, amid NaN."""

    def __init__(self, kind: Kind, members: Sequence[Member]) -> None:
        self._kind = kind
        generator = torch.Generator().manual_seed(1)
        self.lengths = np.array([member.length for member in members], dtype=np.int32)
        sizes = -(-self.lengths // BLOCK)
        num_blocks = int(sizes.sum()) + 2
        numbers = torch.Generator().manual_seed(2)
        unused = iter((torch.randperm(num_blocks - 1, generator=numbers) + 1).tolist())
        self.tables = np.zeros((len(members), sizes.max()), dtype=np.int32)
        for member, table, size in zip(members, self.tables, sizes, strict=True):
            same = member.same // BLOCK
            table[:same] = self.tables[member.parent, :same]
            table[same:size] = [next(unused) for _ in range(same, size)]
        half = kind.num_kv_heads * BLOCK * kind.dim
        memory = torch.full((num_blocks, 2 * half), torch.nan)
        used = torch.from_numpy(np.unique(self.tables[self.tables > 0])).long()
        memory[used] = torch.randn(used.numel(), 2 * half, generator=generator)
        self._cache = CacheView(
            memory=memory.flatten().to(DEVICE, kind.dtype),
            num_blocks=num_blocks,
            block_stride=2 * half,
            key_offset=0,
            value_offset=half,
            num_kv_heads=kind.num_kv_heads,
            block_size=BLOCK,
            key_dim=kind.dim,
            value_dim=kind.dim,
        )
        self._query = torch.randn(len(members), kind.num_heads, kind.dim, generator=generator).to(DEVICE, kind.dtype)
        sinks = torch.randn(kind.num_heads, generator=generator).to(DEVICE, kind.dtype) if kind.has_sinks else None
        self._how = AttentionFeatures(kind.dim**-0.5, kind.window, kind.softcap, sinks)

    def find(self) -> Int32Array:
        found = find_shared_splits(self.tables, self.lengths, BLOCK)
        assert found is not None
        return found

    def attend(
        self,
        module: ModuleType,
        sharing: Int32Array | None = None,
        sequences: Sequence[int] | None = None,
        without_row: Sequence[int] = (),
    ) -> torch.Tensor:
        """The rows of all sequences, or of some of them in this order; those `without_row` are there without a row."""
        chosen = list(range(self.lengths.size)) if sequences is None else list(sequences)
        counts = [0 if sequence in without_row else 1 for sequence in chosen]
        rows = [sequence for sequence in chosen if sequence not in without_row]
        starts = np.array([0, *np.cumsum(counts)], dtype=np.int32)
        call = AttentionCall(
            self._query[rows],
            self._cache,
            torch.from_numpy(starts).to(DEVICE),
            torch.from_numpy(self.lengths[chosen]).to(DEVICE),
            torch.from_numpy(self.tables[chosen]).to(DEVICE),
            self._how,
            work=StepWork(starts, self.lengths[chosen], DEVICE, sharing),
        )
        out: torch.Tensor = module.triton_attention(call)
        return out

    def alone(self, module: ModuleType) -> torch.Tensor:
        """All rows, each computed in a step of its own."""
        return torch.cat([self.attend(module, sequences=[sequence]) for sequence in range(self.lengths.size)])


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return triton_attention_module(monkeypatch)


@pytest.fixture(scope="module")
def fours() -> tuple[Step, torch.Tensor]:
    """A step of all members in groups of 4, and its rows, each computed alone."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        module = triton_attention_module(monkeypatch)
        step = Step(KINDS["groups of 4"], TREE)
        return step, step.alone(module)


@pytest.mark.parametrize("name", KINDS if DEVICE.type == "cuda" else FEW_KINDS)
def test_bits_are_those_of_each_row_alone(module: ModuleType, name: str) -> None:
    step = Step(KINDS[name], TREE)
    expected = step.alone(module)
    assert expected.isfinite().all()
    assert torch.equal(step.attend(module), expected)
    assert torch.equal(step.attend(module, step.find()), expected)


@pytest.mark.parametrize("name", NEVER_SHARING if DEVICE.type == "cuda" else ("groups of 16", "a window"))
def test_where_nothing_is_shared_the_bits_stay(module: ModuleType, name: str) -> None:
    step = Step(*NEVER_SHARING[name])
    assert torch.equal(step.attend(module, step.find()), step.attend(module))


@pytest.mark.parametrize(
    ("name", "count"),
    [("groups of 1", 2), ("groups of 4", 6), ("groups of 8, bfloat16", 10)],
)
def test_any_number_of_sequences_shares(module: ModuleType, name: str, count: int) -> None:
    """More than a tile has room for, and fewer."""
    step = Step(KINDS[name], [Member(SPLIT + 3), *(Member(SPLIT + number % 7, 0, SPLIT) for number in range(1, count))])
    assert torch.equal(step.attend(module, step.find()), step.alone(module))


@pytest.mark.parametrize("programs", [1])
def test_programs_with_several_splits_change_no_bits(
    module: ModuleType, fours: tuple[Step, torch.Tensor], programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program of a large step computes all splits of a sequence in turn."""
    step, expected = fours
    monkeypatch.setattr(dealing, "_PROGRAMS_TO_FILL", programs)
    assert torch.equal(step.attend(module), expected)
    assert torch.equal(step.attend(module, step.find()), expected)


def test_sequences_without_a_row_share(module: ModuleType, fours: tuple[Step, torch.Tensor]) -> None:
    step, alone = fours
    without = (1, 3, 7)
    expected = alone[[place for place in range(len(TREE)) if place not in without]]
    assert torch.equal(step.attend(module, step.find(), without_row=without), expected)


def test_steps_whose_sums_take_too_much_memory_do_not_share(
    module: ModuleType, fours: tuple[Step, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, expected = fours
    monkeypatch.setattr(dealing, "_MOST_SUMS", 0)
    monkeypatch.delattr(module.attention_kernels, "merge")
    assert torch.equal(step.attend(module, step.find()), expected)


def test_sharers_walk_the_blocks_of_one_of_them(module: ModuleType) -> None:
    """Sharing does happen: told that two sequences share what they don't, one of them gets the other one's keys."""
    step = Step(KINDS["groups of 4"], [Member(SPLIT + 1), Member(SPLIT + 1)])
    wrong = step.attend(module, np.array([[0, 1], [0, 0]], dtype=np.int32))
    right = step.attend(module)
    assert torch.equal(wrong[0], right[0])
    assert not torch.equal(wrong[1], right[1])
