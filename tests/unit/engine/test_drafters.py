"""What is drafted, how much, and at which price: the parts of speculation that decide without a scheduler."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.request import Request
from baton.engine.speculation.request_drafts import WINDOW, DraftLength, ForcedDrafter, NgramDrafter, RequestDrafts
from baton.engine.speculation.step_cost import Prices, StepCost
from baton.errors import ConfigError
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams
from baton.messages.spans import Span
from baton.messages.speculation import SpeculationConfig
from tests.doubles.fake_grammar import FakeMatcher


def draft_after(tokens: Sequence[int], most: int, least: int = 2, longest: int = 8) -> list[int]:
    drafter = NgramDrafter(least, longest)
    drafter.extend(tokens)
    return list(drafter.draft(most))


def test_what_followed_the_same_tokens_is_drafted() -> None:
    assert draft_after([1, 2, 3, 4, 5, 9, 1, 2], 3) == [3, 4, 5]


def test_of_several_places_the_one_with_most_in_common_is_taken() -> None:
    assert draft_after([7, 1, 2, 30, 8, 1, 2, 40, 7, 1, 2], 1) == [30]


def test_of_equal_places_the_latest_is_taken() -> None:
    assert draft_after([1, 2, 30, 1, 2, 40, 9, 1, 2], 1) == [40]


def test_a_loop_goes_on() -> None:
    assert draft_after([5, 6, 7, 5, 6, 7], 7) == [5, 6, 7, 5, 6, 7, 5]
    assert draft_after([4, 4, 4], 3) == [4, 4, 4]


def test_a_draft_ends_with_a_token_that_ends_the_sequence() -> None:
    drafter = NgramDrafter(2, 8, {30, 31})
    drafter.extend([1, 2, 3, 31, 4, 30, 9, 1, 2])
    assert list(drafter.draft(6)) == [3, 31]


@pytest.mark.parametrize("tokens", [[], [1], [1, 2], [1, 2, 3, 4, 5], [1, 2, 9, 1, 3]])
def test_nothing_is_drafted_where_nothing_occurred_before(tokens: list[int]) -> None:
    assert draft_after(tokens, 4) == []


def slow_draft(tokens: Sequence[int], most: int, least: int, longest: int) -> list[int]:
    """The definition, for texts shorter than the search is bounded to."""
    best, place = least - 1, -1
    for end in range(len(tokens) - 1, 0, -1):
        common = 0
        while common < min(longest, end) and tokens[end - 1 - common] == tokens[len(tokens) - 1 - common]:
            common += 1
        if common > best:
            best, place = common, end
    if place < 0:
        return []
    out = list(tokens)
    for _ in range(most):
        out.append(out[place + len(out) - len(tokens)])
    return out[len(tokens) :]


@given(
    pieces=st.lists(st.lists(st.integers(0, 3), max_size=5), max_size=6),
    most=st.integers(1, 6),
    least=st.integers(1, 3),
)
def test_drafts_are_those_of_a_plain_search(pieces: list[list[int]], most: int, least: int) -> None:
    drafter, tokens = NgramDrafter(least, 8), list[int]()
    for piece in pieces:
        drafter.extend(piece)
        tokens += piece
        # The bounded search may miss the best place only where there are more than 16 places.
        if sum(tokens[place - least : place] == tokens[-least:] for place in range(least, len(tokens))) <= 16:
            assert list(drafter.draft(most)) == slow_draft(tokens, most, least, 8)


def test_a_long_text_is_searched_in_its_window() -> None:
    chance = random.Random(1)
    text = [chance.randrange(50_000) for _ in range(WINDOW + 5000)]
    drafter = NgramDrafter(3, 8)
    drafter.extend(text)
    for _ in range(WINDOW // 1000):
        drafter.draft(1)  # each call enters a part of the text
    drafter.extend(text[-3000:-2990])
    assert list(drafter.draft(4)) == text[-2990:-2986]
    drafter.extend(text[:10])  # it has left the window
    assert list(drafter.draft(4)) == []


def test_a_grammar_drafts_what_it_forces() -> None:
    output = [1, 2]
    drafter = ForcedDrafter(FakeMatcher([{1, 5}, {2}, {3}, {4}, {8, 9}], {0}), output)
    assert drafter.draft(5) == [3, 4]
    assert drafter.draft(1) == [3]
    output.append(3)
    assert drafter.draft(5) == [4]


def test_a_grammar_that_fails_drafts_nothing() -> None:
    assert list(ForcedDrafter(FakeMatcher([{1}, {2}], {0}), [7]).draft(3)) == []


def test_drafts_grow_while_they_are_right() -> None:
    length, lengths = DraftLength(16, 64, 0.75), list[int]()
    for _ in range(8):
        lengths.append(length.next(0.05))
        length.verified(lengths[-1], lengths[-1], 0.05)
    assert lengths == sorted(lengths)
    assert lengths[-1] == 16
    assert 4 <= lengths[0] <= 12


@pytest.mark.parametrize("assumed", [0.35, 0.6, 0.85, 0.9])
def test_drafts_that_are_always_right_stay_bounded(assumed: float) -> None:
    length = DraftLength(16, 64, assumed)
    for _ in range(2000):
        length.verified(count := length.next(0.05), count, 0.05)
    assert length.next(0.05) == 16
    assert length.next(0.999) == 1


def test_drafting_pauses_longer_and_longer_while_drafts_are_wrong() -> None:
    length, at = DraftLength(16, 64, 0.75), list[int]()
    for step in range(400):
        count = length.next(0.05)
        if count:
            at.append(step)
            length.verified(count, 0, 0.05)
    pauses = [later - earlier - 1 for earlier, later in pairwise(at)]
    assert pauses == sorted(pauses)
    assert pauses[-1] == 64
    assert len(at) < 30


def test_drafting_resumes_when_drafts_are_right_again() -> None:
    length = DraftLength(16, 64, 0.75)
    for _ in range(200):
        count = length.next(0.05)
        if count:
            length.verified(count, 0, 0.05)
    waited = next(step for step in range(100) if (count := length.next(0.05)))
    assert waited <= 64
    for _ in range(12):
        length.verified(count, count, 0.05)
        count = length.next(0.05)
    assert count == 16


def test_dear_rows_make_short_drafts() -> None:
    assert DraftLength(16, 64, 0.75).next(0.9) == 1
    assert DraftLength(16, 64, 0.75).next(1.0) == 0


def test_the_price_of_a_row_is_its_share_of_a_tokens_cost() -> None:
    cost = StepCost()
    for rows in (1, 9, 1, 5, 1, 3) * 10:
        cost.add(rows, 10.0 + 0.5 * rows)
    assert cost.price(1) == pytest.approx(0.5 / 10.5)
    assert cost.price(20) == pytest.approx(0.5)


def test_without_steps_of_different_sizes_the_price_is_assumed() -> None:
    cost = StepCost()
    assert 0 < cost.price(1) < 0.1
    for _ in range(20):
        cost.add(4, 0.01)
    assert 0 < cost.price(1) < cost.price(4) < 0.3


def test_old_steps_fade() -> None:
    cost = StepCost()
    for rows in (1, 9) * 40:
        cost.add(rows, 1.0 + rows)
    for rows in (1, 9) * 400:
        cost.add(rows, 100.0 + rows)
    assert cost.price(1) == pytest.approx(1 / 101, rel=0.05)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[1]", "must be a JSON object"),
        ("{", "is no JSON"),
        ('{"method": "eagle"}', "method must be one of ngram, grammar"),
        ('{"num_speculative_token": 3}', "did you mean num_speculative_tokens"),
        ('{"num_speculative_tokens": 0}', "num_speculative_tokens must be from 1 to 64"),
        ('{"num_speculative_tokens": 65}', "num_speculative_tokens must be from 1 to 64"),
        ('{"num_speculative_tokens": true}', "must be a whole number"),
        ('{"num_speculative_tokens": 3.5}', "must be a whole number"),
        ('{"prompt_lookup_min": 5, "prompt_lookup_max": 4}', "the first no larger than the second"),
        ('{"prompt_lookup_max": 33}', "from 1 to 32"),
        ('{"method": "draft_model"}', "needs a model"),
        ('{"method": "ngram", "model": "small"}', "no other method has one"),
        ('{"model": 3}', "must be the name of a model"),
        ('{"model": "' + "x" * 5000 + '"}', "must be the name of a model"),
        ('{"model": "small", "quantization": "int3"}', "must be one of off, int8, int4"),
        ('{"model": "small", "quantization": ["int4"]}', "must be one of off, int8, int4"),
    ],
)
def test_a_wrong_configuration_is_refused_with_a_reason(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        SpeculationConfig.from_json(text)


def test_a_configuration_has_vllms_names() -> None:
    text = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 4}'
    assert SpeculationConfig.from_json(text) == SpeculationConfig("ngram", 5, 2, 4)
    with_model = SpeculationConfig.from_json('{"model": "small", "num_speculative_tokens": 5}')
    assert with_model == SpeculationConfig("draft_model", 5, model="small")
    assert SpeculationConfig.from_json(with_model.to_json()) == with_model


def test_placeholders_in_spans_are_no_text() -> None:
    spans = [Span(0, 6, "a" * 64), Span(8, 4, "b" * 64)]
    config = SpeculationConfig("ngram", num_speculative_tokens=3, prompt_lookup_min=2, prompt_lookup_max=4)

    def drafts(prompt: list[int]) -> Sequence[int]:
        request = Request("r", RequestSpec(prompt, SamplingParams(), spans=spans))
        drafting = RequestDrafts(request, config)
        drafting.follow(Prices(0.1, 0.1))
        return drafting.draft()

    assert drafts([*[0] * 6, 1, 2, *[0] * 4, 3, 4, 5, 3, 4]) == [5, 3]
    assert drafts([*[0] * 6, 1, 2, *[0] * 4, 0, 0]) == ()
    assert drafts([*[0] * 6, 1, 2, *[0] * 4, 1, 2]) == ()
    alone = Request("r", RequestSpec([0] * 12, SamplingParams(), spans=spans))
    model = RequestDrafts(alone, SpeculationConfig("draft_model", model="d"))
    model.follow(Prices(0.1, 0.1), [1, 2])
    assert (model.num_wanted, model.draft()) == (0, ())
