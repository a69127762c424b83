"""The identifiers that are part of every message."""

from __future__ import annotations

from random import Random

import pytest

from baton.messages.ids import REQUEST_ID_PATTERN, AttemptKey, new_request_id


@pytest.mark.parametrize(
    "key", [AttemptKey("r", 1), AttemptKey("a.b:c-d_e", 12, 2**64 - 1), AttemptKey("x#1@2", 3, 0x10), AttemptKey("", 0)]
)
def test_an_attempt_key_is_parsed_from_its_text(key: AttemptKey) -> None:
    assert AttemptKey.parse(str(key)) == key


def test_attempts_of_two_flights_of_one_request_id_differ() -> None:
    assert len({AttemptKey("r", 1), AttemptKey("r", 1, 7), AttemptKey("r", 2, 7)}) == 3
    assert len({str(AttemptKey("r", 1, 7)), str(AttemptKey("r", 1)), str(AttemptKey("r", 17))}) == 3


@pytest.mark.parametrize("text", ["", "r", "r#", "r#x", "r#1@", "r#1@g", "r#-1", "r#1@2 "])
def test_other_text_is_not_parsed_as_an_attempt_key(text: str) -> None:
    with pytest.raises(ValueError, match="attempt key"):
        AttemptKey.parse(text)


def test_a_request_id_has_more_chance_than_can_be_tried() -> None:
    ids = [new_request_id(Random(seed)) for seed in range(400)]
    assert all(REQUEST_ID_PATTERN.match(one) for one in ids)
    letters = {one.removeprefix("req-") for one in ids}
    assert {len(one) for one in letters} == {26}
    assert {len({one[place] for one in letters}) for place in range(26)} == {32}
