"""Deadlines: the first one, the due ones, and how many changed ones are kept."""

from __future__ import annotations

from random import Random

import pytest

from baton.deadlines import Deadlines


def test_the_first_deadline_is_known_and_due_ones_come_in_order() -> None:
    deadlines: Deadlines[tuple[str]] = Deadlines()
    assert deadlines.first() is None
    for name, until in (("c", 3.0), ("a", 1.0), ("b", 2.0), ("late", 9.0)):
        deadlines.set((name,), until)
    assert deadlines.first() == 1.0
    deadlines.set(("a",), 2.5)
    deadlines.clear(("b",))
    deadlines.clear(("nobody",))
    assert deadlines.first() == 2.5
    assert deadlines.take_due(3.0) == [("a",), ("c",)]
    assert deadlines.take_due(3.0) == []
    assert (deadlines.first(), len(deadlines)) == (9.0, 1)


@pytest.mark.parametrize("seed", range(50))
def test_deadlines_agree_with_a_plain_table(seed: int) -> None:
    rng = Random(seed)
    deadlines: Deadlines[tuple[int]] = Deadlines()
    plain: dict[tuple[int], float] = {}
    for now in range(300):
        key = (rng.randrange(12),)
        match rng.randrange(4):
            case 0 | 1:
                plain[key] = float(now + rng.randrange(1, 40))
                deadlines.set(key, plain[key])
            case 2:
                plain.pop(key, None)
                deadlines.clear(key)
            case 3:
                due = deadlines.take_due(now)
                assert [plain[key] for key in due] == sorted(until for until in plain.values() if until <= now)
                plain = {key: until for key, until in plain.items() if until > now}
        assert deadlines.first() == min(plain.values(), default=None)
        assert {key for key in plain if key in deadlines} == plain.keys()
        assert len(deadlines) == len(plain)


def test_deadlines_that_are_renewed_repeatedly_need_no_more_memory() -> None:
    deadlines: Deadlines[tuple[int]] = Deadlines()
    for now in range(10_000):
        deadlines.set((now % 10,), now + 1e6)
    assert len(deadlines._heap) < 100
    assert deadlines.first() == 9990 + 1e6
