"""The draft model's bookkeeping: whatever happens to blocks, it drafts what it would draft from scratch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from operator import xor
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from baton.engine.batch import NewRequestData, SchedulerOutput
from baton.engine.long_sequences import LongSequences
from baton.engine.runner import KVLayout
from baton.messages.sampling import SamplingParams
from baton.runner.execution.draft_model import MAX_ROWS_BEHIND, DraftModel
from baton.runner.execution.input_batch import FlatBatch
from baton.runner.execution.request_table import RequestState

BLOCK = 4
VOCABULARY = 50
EOS = 49
GREEDY = SamplingParams(temperature=0.0)
_START = 12345


def mix(before: int, token_id: int) -> int:
    return (before * 6364136223846793005 + token_id * 1442695040888963407 + 1) % 2**61


def draw(slots: Sequence[int]) -> int:
    """The token after a history with these slots; of one history in 60 the end of the text."""
    number = reduce(xor, slots) >> 7
    return EOS if number % 60 == 0 else number % (VOCABULARY - 1)


def guesses(token_ids: Sequence[int], count: int) -> list[int]:
    """What the fake model generates after these tokens."""
    slots, found = [_START], list[int]()
    for token_id in token_ids:
        slots.append(mix(slots[-1], token_id))
    while len(found) < count:
        found.append(draw(slots[1:]))
        if found[-1] == EOS:
            break
        slots.append(mix(slots[-1], found[-1]))
    return found


class FakeTransformer:
    """A `DraftTransformer` whose logits depend on all slots of a sequence's history, read through its block table."""

    row_quantum = 1
    long_sequences: LongSequences | None = None

    def __init__(self, num_blocks: int) -> None:
        self.layout = KVLayout.uniform(BLOCK, 1, 1, 1, "float32")
        self.slots = [0] * (num_blocks * BLOCK)
        self.num_rows = 0

    def compute(self, batch: FlatBatch) -> npt.NDArray[np.float32]:
        logits = []
        sampled = set(batch.logits_rows.tolist())
        for index, length in enumerate(batch.seq_lens):
            table = batch.block_tables[0][index]
            first, last = batch.query_start[index], batch.query_start[index + 1]
            for row, position in zip(range(first, last), range(length - (last - first), length), strict=True):
                assert batch.positions[row] == position
                before = self._slot(table, position - 1) if position else _START
                self.slots[table[position // BLOCK] * BLOCK + position % BLOCK] = mix(before, int(batch.token_ids[row]))
                self.num_rows += 1
                if row in sampled:
                    logits.append(
                        np.eye(VOCABULARY, dtype=np.float32)[
                            draw([self._slot(table, before) for before in range(position + 1)])
                        ]
                    )
        return np.array(logits, dtype=np.float32).reshape(-1, VOCABULARY)

    def _slot(self, table: npt.NDArray[np.int32], position: int) -> int:
        slot: int = self.slots[table[position // BLOCK] * BLOCK + position % BLOCK]
        return slot


def step_with(**fields: Any) -> SchedulerOutput:
    return replace(SchedulerOutput(0, (), (), {}, 0), **fields)


class Rig:
    """A draft model over a fake transformer."""

    def __init__(
        self, num_blocks: int = 64, num_scratch: int = 16, num_groups: int = 1, drafted_vocab_size: int = VOCABULARY
    ) -> None:
        self.transformer = FakeTransformer(num_blocks + num_scratch)
        self.num_groups = num_groups
        self.model = DraftModel(
            self.transformer,
            num_blocks=num_blocks,
            num_scratch_blocks=num_scratch,
            num_groups=num_groups,
            max_model_len=1000,
            vocab_size=VOCABULARY,
            drafted_vocab_size=drafted_vocab_size,
            eos_token_ids=frozenset({EOS}),
        )

    def request(
        self, name: str, token_ids: Sequence[int], blocks: Sequence[int], params: SamplingParams = GREEDY
    ) -> RequestState:
        """A request with this prompt; each of its groups has blocks, and those of all but the first one are no use."""
        return RequestState(self.data(name, token_ids, blocks, params))

    def data(
        self, name: str, token_ids: Sequence[int], blocks: Sequence[int], params: SamplingParams = GREEDY
    ) -> NewRequestData:
        table = [block for first in blocks for block in (first, *[0] * (self.num_groups - 1))]
        return NewRequestData(name, token_ids, (), params, table, 0)

    def forget(self, *names: str) -> None:
        self.model.update(step_with(finished_req_ids=frozenset(names)))

    def draft(self, wanted: Sequence[tuple[RequestState, int]], spare: int = 1000) -> dict[str, list[int]]:
        self.transformer.num_rows = 0
        return {name: list(drafts) for name, drafts in self.model.draft(wanted, spare).token_ids.items()}


def text(length: int, seed: int = 0) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(VOCABULARY - 1) for _ in range(length)]


@pytest.mark.parametrize("num_groups", [1, 3])
def test_it_drafts_what_it_generates_and_computes_each_token_once(num_groups: int) -> None:
    rig = Rig(num_groups=num_groups)
    state = rig.request("r", text(10), range(1, 5))
    expected = guesses(text(10), 5)
    assert rig.draft([(state, 5)]) == {"r": expected}
    assert rig.transformer.num_rows == 10 + 4
    # Two drafts were right, and another token followed: the drafts' keys are computed again, nothing else is.
    for token_id in (*expected[:2], 7):
        state.append_token(token_id)
    assert rig.draft([(state, 3)]) == {"r": guesses([*text(10), *expected[:2], 7], 3)}
    assert rig.transformer.num_rows == 3 + 2


def test_drafts_reach_beyond_the_blocks_of_a_request() -> None:
    rig = Rig()
    full = rig.request("full", text(9, seed=1), [5, 6])  # the last token has no slot yet
    other = rig.request("other", text(8, seed=2), [7, 8])
    drafts = rig.draft([(full, 9), (other, 7)])
    assert drafts == {"full": guesses(text(9, seed=1), 9), "other": guesses(text(8, seed=2), 7)}
    for state in (full, other):
        state.append_token(3)
        state.append_blocks([9 if state is full else 10])
    assert rig.draft([(full, 2), (other, 2)]) == {
        "full": guesses([*text(9, seed=1), 3], 2),
        "other": guesses([*text(8, seed=2), 3], 2),
    }
    assert rig.transformer.num_rows == 2 + 1 + 1 + 1


def test_without_scratch_blocks_a_request_gets_no_drafts_and_others_do() -> None:
    rig = Rig(num_scratch=1)
    states = [rig.request(name, text(8, seed), [2 * seed + 1, 2 * seed + 2]) for seed, name in enumerate("abc")]
    assert rig.draft([(states[0], 9), (states[1], 3), (states[2], 3)]) == {"b": guesses(text(8, 1), 3)}


def test_shared_blocks_are_computed_once_and_foreign_ones_again() -> None:
    rig = Rig()
    start = text(12)
    rig.draft([(rig.request("a", [*start, 1], range(1, 5)), 1)])
    same = rig.request("b", [*start, 2], [1, 2, 3, 9])
    assert rig.draft([(same, 1)]) == {"b": guesses([*start, 2], 1)}
    assert rig.transformer.num_rows == 1
    # Block 2 is another request's now, with other tokens before and in it.
    other = [*text(8, seed=5), 3]
    rig.draft([(rig.request("c", other, [11, 2, 12]), 1)])
    again = rig.request("d", [*start, 4], [1, 2, 3, 10])
    assert rig.draft([(again, 2)]) == {"d": guesses([*start, 4], 2)}
    assert rig.transformer.num_rows == 9 + 1


def test_a_block_that_was_overwritten_in_part_is_computed_again() -> None:
    rig = Rig()
    rig.draft([(rig.request("a", text(9), [1, 2, 3]), 1)])
    rig.draft([(rig.request("b", text(6, seed=1), [4, 2]), 1)])
    assert rig.draft([(rig.request("c", text(9), [1, 2, 5]), 2)]) == {"c": guesses(text(9), 2)}


def test_drafts_that_reach_into_further_blocks_overwrite_them() -> None:
    rig = Rig()
    rig.draft([(rig.request("a", text(13), [1, 2, 3, 4]), 1)])
    rig.draft([(rig.request("b", text(6, seed=1), [8, 9, 3]), 7)])  # its third block has no known token yet
    assert rig.draft([(rig.request("c", text(13), [1, 2, 3, 5]), 2)]) == {"c": guesses(text(13), 2)}


def test_a_request_that_is_far_behind_catches_up_before_it_gets_drafts() -> None:
    rig = Rig()
    tokens = text(150)
    state = rig.request("r", tokens, range(1, 40))
    assert rig.draft([(state, 4)], spare=50) == {"r": []}
    assert rig.transformer.num_rows == 50
    assert rig.draft([(state, 4)], spare=0) == {"r": []}
    assert rig.transformer.num_rows == 0
    assert rig.draft([(state, 4)], spare=150 - 50 - MAX_ROWS_BEHIND) == {"r": guesses(tokens, 4)}


def test_expected_requests_are_computed_before_they_run() -> None:
    rig = Rig()
    first, second = text(40), [*text(40)[:20], *text(9, seed=2)]
    expected = [rig.data("first", first, range(1, 12)), rig.data("second", second, [1, 2, 3, 4, 5, 20, 21, 22])]
    rig.model.update(step_with(loading_reqs=expected))
    assert rig.model.draft((), 30).computes_ahead
    assert rig.model.draft((), 9).computes_ahead
    assert rig.transformer.num_rows == 39
    assert not rig.model.draft((), 100).computes_ahead
    assert rig.transformer.num_rows == 39 + 8  # the second one's first five blocks are those of the first one
    rig.model.update(step_with(scheduled_new_reqs=expected))
    states = [RequestState(data) for data in expected]
    drafts = rig.draft([(state, 3) for state in states], spare=0)
    assert drafts == {"first": guesses(first, 3), "second": guesses(second, 3)}
    # Tokens in blocks that are not full are computed again: 3 of the first request, none of the second; and each one's
    # last token is computed for its logits.
    assert rig.transformer.num_rows == 4 + 1 + 2 * 2


def test_an_expected_request_that_ends_is_forgotten() -> None:
    rig = Rig()
    rig.model.update(step_with(loading_reqs=[rig.data("r", text(40), range(1, 12))]))
    assert rig.model.draft((), 0).computes_ahead
    rig.forget("r")
    assert not rig.model.draft((), 100).computes_ahead
    assert rig.transformer.num_rows == 0


def test_a_request_that_lost_its_blocks_starts_again() -> None:
    rig = Rig()
    state = rig.request("r", text(6), [1, 2])
    rig.draft([(state, 2)])
    rig.forget("r")
    rig.draft([(rig.request("thief", text(6, seed=3), [4, 2]), 2)])
    state.set_blocks([1, 2])
    assert rig.draft([(state, 2)]) == {"r": guesses(text(6), 2)}
    assert rig.transformer.num_rows == 2 + 1


def test_what_it_does_not_know_is_not_drafted() -> None:
    rig = Rig(num_blocks=300)
    foreign = rig.request("foreign", [1, VOCABULARY, 2], [1])
    longest = rig.request("longest", text(998), range(2, 270))
    none = rig.request("none", text(3), [290])
    assert rig.draft([(foreign, 3), (longest, 9), (none, 0)], spare=2000) == {"longest": guesses(text(998), 2)}


@pytest.mark.parametrize("drafted_vocab_size", [VOCABULARY - 2, VOCABULARY + 14])
def test_parameters_of_requests_fit_a_model_of_another_width(drafted_vocab_size: int) -> None:
    """Padded vocabularies differ between models of one family. A token that the draft model lacks ends the draft."""
    rig = Rig(drafted_vocab_size=drafted_vocab_size)
    last = drafted_vocab_size - 1
    of_all = SamplingParams(
        temperature=0.0, allowed_token_ids=tuple(range(drafted_vocab_size)), logit_bias={last: -1.0}
    )
    always_last = SamplingParams(temperature=0.0, logit_bias={last: 2e30})
    seed = next(seed for seed in range(1000) if max(guesses(text(6, seed), 5)) < VOCABULARY - 2)
    states = [
        rig.request("all", text(6, seed), [1, 2], of_all),
        rig.request("last", text(6, seed), [3, 4], always_last),
        rig.request("plain", text(6, seed), [5, 6]),
    ]
    drafts = rig.draft([(state, 5) for state in states])
    assert drafts["all"] == drafts["plain"] == guesses(text(6, seed), 5)
    assert drafts["last"] == ([last] * 5 if last < VOCABULARY else [last])


def test_penalties_count_the_drafts_and_only_while_they_are_drafted() -> None:
    params = SamplingParams(temperature=0.0, frequency_penalty=0.4, repetition_penalty=3.0)
    rig = Rig()
    state = rig.request("r", text(9), range(1, 20), params)
    for turn in range(12):
        output = tuple(state.token_ids[9:].tolist())
        fresh = RequestState(replace(rig.data("fresh", text(9), range(1, 20), params), output_token_ids=output))
        expected = Rig().draft([(fresh, 6)])["fresh"]
        assert rig.draft([(state, 6)])["r"] == expected
        for token_id in expected[: turn % 4] or [turn]:
            state.append_token(token_id)
    assert state._counts is None


def test_drafts_end_where_the_output_may_stop() -> None:
    """At the request's own stop tokens, and at the end of a text unless the request ignores it."""
    seed = next(seed for seed in range(1000) if EOS in guesses(text(5, seed), 6)[1:3])
    expected = guesses(text(5, seed), 6)
    rig = Rig()
    stops = SamplingParams(temperature=0.0, stop_token_ids=frozenset({expected[0]}))
    ignores = SamplingParams(temperature=0.0, ignore_eos=True)
    drafts = rig.draft(
        [
            (rig.request("stops", text(5, seed), [1, 2], stops), 6),
            (rig.request("ignores", text(5, seed), [3, 4, 5], ignores), 6),
        ]
    )
    assert drafts["stops"] == expected[:1]
    assert drafts["ignores"][: len(expected)] == expected
    assert len(drafts["ignores"]) == 6


def test_drafts_end_with_the_text() -> None:
    seed = next(seed for seed in range(1000) if EOS in guesses(text(5, seed), 6)[:3])
    rig = Rig()
    drafts = rig.draft([(rig.request("r", text(5, seed), [1, 2]), 6)])["r"]
    assert drafts[-1] == EOS
    assert len(drafts) <= 3


class Blocks:
    """Blocks with counts of their users; the one that was freed first is taken first."""

    def __init__(self, num_blocks: int) -> None:
        self.free = list(range(1, num_blocks))
        self._users: dict[int, int] = {}

    def take(self, count: int) -> list[int]:
        taken, self.free = self.free[:count], self.free[count:]
        assert len(taken) == count
        return self.share(taken)

    def share(self, blocks: list[int]) -> list[int]:
        for block in blocks:
            self._users[block] = self._users.get(block, 0) + 1
        return blocks

    def give_back(self, blocks: list[int]) -> None:
        for block in blocks:
            self._users[block] -= 1
            if not self._users[block]:
                self.free.append(block)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_to_blocks_the_drafts_are_right(seed: int) -> None:
    """Requests come, share beginnings, grow by right and wrong drafts, lose their blocks, end; blocks go round."""
    chance = random.Random(seed)
    rig, blocks = Rig(num_blocks=40, num_scratch=12), Blocks(40)
    states: dict[str, RequestState] = {}
    num_drafts = 0
    for turn in range(150):
        if len(states) < 4 and len(blocks.free) > 16:
            beginning, shared = list[int](), list[int]()
            if states and chance.random() < 0.5:
                other = chance.choice(list(states.values()))
                num_full = chance.randint(0, (other.num_tokens - 1) // BLOCK)
                beginning = other.token_ids[: num_full * BLOCK].tolist()
                shared = blocks.share(other.block_table[:num_full].tolist())
            tokens = [*beginning, *text(chance.randint(1, 14), 1000 * seed + turn)]
            own = blocks.take(-(-len(tokens) // BLOCK) - len(shared))
            states[f"r{turn}"] = rig.request(f"r{turn}", tokens, [*shared, *own])
        wanted = [(state, chance.randint(1, 9)) for state in states.values() if chance.random() < 0.8]
        known = {state.request_id: state.token_ids.tolist() for state, _ in wanted}
        drafts = rig.draft(wanted, spare=chance.choice([0, 10, 100]))
        num_drafts += len(drafts)
        for state, most in wanted:
            if drafts.get(state.request_id):
                assert drafts[state.request_id] == guesses(known[state.request_id], most)
        for name, state in list(states.items()):
            for token_id in [*drafts.get(name, [])[: chance.randint(0, 4)], chance.randrange(VOCABULARY - 1)]:
                state.append_token(token_id)
            while state.block_table.size * BLOCK < state.num_tokens:
                state.append_blocks(blocks.take(1))
            fate = chance.random()
            table = state.block_table.tolist()
            if fate < 0.1 or state.num_tokens > 60 or len(blocks.free) < 8:
                rig.forget(name)
                del states[name]
                blocks.give_back(table)
            elif fate < 0.2:
                rig.forget(name)
                blocks.give_back(table)
                state.set_blocks(blocks.take(len(table)))
    assert num_drafts > 60
