"""The identifiers that are part of every message."""

from __future__ import annotations

from random import Random

from baton.messages.ids import REQUEST_ID_PATTERN, AttemptKey, new_request_id


def test_attempts_of_two_flights_of_one_request_id_differ() -> None:
    assert len({AttemptKey("r", 1), AttemptKey("r", 1, 7), AttemptKey("r", 2, 7)}) == 3
    assert len({str(AttemptKey("r", 1, 7)), str(AttemptKey("r", 1)), str(AttemptKey("r", 17))}) == 3


def test_a_request_id_has_more_chance_than_can_be_tried() -> None:
    ids = [new_request_id(Random(seed)) for seed in range(400)]
    assert all(REQUEST_ID_PATTERN.match(one) for one in ids)
    letters = {one.removeprefix("req-") for one in ids}
    assert {len(one) for one in letters} == {26}
    assert {len({one[place] for one in letters}) for place in range(26)} == {32}
