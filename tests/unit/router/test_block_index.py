"""The index of blocks, compared with a dictionary of sets."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import takewhile
from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.placement.block_index import NODES_PER_BANK, BlockIndex

NODES = [f"n{number}" for number in range(6)]


def key_of(number: int) -> bytes:
    """Return a key that collides with many others. Number 0 is the word that marks an empty slot."""
    return ((number << 40) | number % 199).to_bytes(8, "little") + bytes(24)


def keys_of(numbers: Sequence[int]) -> list[bytes]:
    return [key_of(number) for number in numbers]


batches = st.one_of(
    st.lists(st.integers(0, 2000), max_size=12),
    st.builds(lambda start, size: list(range(start, start + size)), st.integers(0, 3000), st.integers(0, 700)),
)
nodes = st.sampled_from(NODES)


class IndexMachine(RuleBasedStateMachine):
    """Random additions and removals of keys and nodes, while tables are moved."""

    def __init__(self) -> None:
        super().__init__()
        self.index = BlockIndex(moved_per_change=8)
        self.model: dict[str, set[int]] = {node: set() for node in NODES}

    @rule(node=nodes, numbers=batches)
    def add(self, node: str, numbers: list[int]) -> None:
        self.index.add(node, keys_of(numbers))
        self.model[node].update(numbers)

    @rule(node=nodes, numbers=batches)
    def remove(self, node: str, numbers: list[int]) -> None:
        self.index.remove(node, keys_of(numbers))
        self.model[node].difference_update(numbers)

    @rule(node=nodes)
    def forget(self, node: str) -> None:
        self.index.forget(node)
        self.model[node].clear()

    @rule(numbers=batches)
    def look_up(self, numbers: list[int]) -> None:
        expected = {node: len(list(takewhile(had.__contains__, numbers))) for node, had in self.model.items()}
        assert self.index.leading(keys_of(numbers)) == {node: count for node, count in expected.items() if count}

    @rule(count=st.integers(1, 200))
    def many_come_and_go(self, count: int) -> None:
        """Add and remove many nodes: their bits are released and reused after the next move."""
        for number in range(count):
            self.index.add(f"guest{number}", keys_of([number]))
            self.index.forget(f"guest{number}")

    @invariant()
    def counts_agree(self) -> None:
        assert {node: self.index.count(node) for node in NODES} == {n: len(had) for n, had in self.model.items()}
        assert len(self.index) == sum(map(len, self.model.values()))


TestBlockIndex = IndexMachine.TestCase
TestBlockIndex.settings = settings(max_examples=15, stateful_step_count=25)


def test_the_index_holds_more_nodes_than_a_mask_has_bits() -> None:
    index, names = BlockIndex(), [f"n{number}" for number in range(3 * NODES_PER_BANK)]
    for number, name in enumerate(names):
        index.add(name, keys_of(range(number + 1)))
    assert index.leading(keys_of(range(500))) == {name: number + 1 for number, name in enumerate(names)}


def test_removing_a_node_leaves_the_others_unchanged_over_many_successors() -> None:
    index, chain = BlockIndex(), [hashlib.sha256(bytes([number])).digest() for number in range(200)]
    index.add("stays", chain)
    for number in range(200):
        index.add(f"run{number}", chain[:50])
        assert index.leading(chain) == {"stays": 200, f"run{number}": 50}
        index.forget(f"run{number}")
    assert index.leading(chain) == {"stays": 200}


def test_keys_of_other_layer_groups_do_not_count() -> None:
    index = BlockIndex()
    index.add("n", [key_of(1), key_of(2) + b"\x01", key_of(3)])
    assert (index.count("n"), index.leading(keys_of([1, 3]))) == (2, {"n": 2})


def test_a_key_that_comes_twice_at_once_counts_once() -> None:
    index = BlockIndex()
    index.add("n", keys_of([*range(100), *range(100)]))
    index.remove("n", keys_of([*range(60), *range(60)]))
    assert index.count("n") == 40


def test_a_known_key_counts_once_while_tables_are_moved() -> None:
    index, model, rng = BlockIndex(moved_per_change=8), set[int](), Random(1)
    for start in range(0, 1400, 2):
        again = [rng.randrange(start + 1) for _ in range(3)]
        index.add("n", keys_of([start, start + 1, *again]))
        model.update((start, start + 1, *again))
        gone = [rng.randrange(start + 1) for _ in range(2)]
        index.remove("n", keys_of(gone))
        model.difference_update(gone)
        assert index.count("n") == len(model)
    assert all(index.leading(keys_of([number])) == ({"n": 1} if number in model else {}) for number in range(1400))
