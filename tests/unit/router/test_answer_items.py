"""The rules of an answer's items: what begins one, what ends one, and that one is open at a time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from random import Random

import pytest

from baton.text.tool_calls.events import CallEnded, Content
from router.http.answer_items import AnswerItems, Begun, Ended, Grown, ItemChange, ItemKind
from router.http.parsed_text import AnswerPart, CallArguments, NamedCall, Reasoning

CALL = NamedCall(0, "c0", "f")
ARGUMENTS, WHOLE, CUT = CallArguments(0, "{}"), CallEnded(True), CallEnded(False)
UNITS: Sequence[Sequence[AnswerPart]] = [
    [Reasoning("r")],
    [Content("t")],
    [CALL, WHOLE],
    [CALL, ARGUMENTS, WHOLE],
    [CALL, ARGUMENTS, ARGUMENTS, CUT],
]


def named(kind: ItemKind, place: int, call: NamedCall | None) -> str:
    return f"{place} {kind}" + (f" {call.name}" if call is not None else "")


def told(changes: Sequence[ItemChange[str]]) -> list[str]:
    """A line for each change."""
    lines = []
    for change in changes:
        match change:
            case Begun(item):
                lines.append(f"+ {item}")
            case Grown(item, text):
                lines.append(f"{item}: {text}")
            case Ended(item, is_complete):
                lines.append(f"- {item}" + ("" if is_complete else ", cut"))
    return lines


@pytest.mark.parametrize(
    ("parts", "is_complete", "lines"),
    [
        ([], True, ["+ 0 text", "- 0 text"]),
        ([], False, ["+ 0 text", "- 0 text, cut"]),
        ([Content("a"), Content("b")], False, ["+ 0 text", "0 text: a", "0 text: b", "- 0 text, cut"]),
        (
            [Reasoning("a"), Content("b")],
            False,
            ["+ 0 reasoning", "0 reasoning: a", "- 0 reasoning", "+ 1 text", "1 text: b", "- 1 text, cut"],
        ),
        ([CALL, WHOLE], False, ["+ 0 call f", "- 0 call f"]),
        ([CALL, ARGUMENTS, CUT], True, ["+ 0 call f", "0 call f: {}", "- 0 call f, cut"]),
        ([CALL, WHOLE, CALL, WHOLE], True, ["+ 0 call f", "- 0 call f", "+ 1 call f", "- 1 call f"]),
        (
            [Content("a"), CALL, WHOLE, Content("b")],
            True,
            ["+ 0 text", "0 text: a", "- 0 text", "+ 1 call f", "- 1 call f", "+ 2 text", "2 text: b", "- 2 text"],
        ),
    ],
)
def test_an_item_begins_with_its_first_part_and_ends_before_the_next(
    parts: Sequence[AnswerPart], is_complete: bool, lines: Sequence[str]
) -> None:
    items = AnswerItems(named)
    assert told([*items.take(parts), *items.finish(is_complete=is_complete)]) == lines


@pytest.mark.parametrize("before", [[], [Content("a")], [CALL, WHOLE]])
def test_arguments_without_an_open_call_begin_no_item(before: Sequence[AnswerPart]) -> None:
    items = AnswerItems(named)
    items.take(before)
    with pytest.raises(ValueError, match="while no call was open"):
        items.take([ARGUMENTS])
    assert len(items.items) == bool(before)


@pytest.mark.parametrize("seed", range(100))
def test_one_item_is_open_at_a_time_and_all_are_listed(seed: int) -> None:
    rng = Random(seed)
    parts = [part for unit in rng.choices(UNITS, k=rng.randrange(8)) for part in unit]
    items = AnswerItems(named)
    changes = [change for part in parts for change in items.take([part])]
    changes += items.finish(is_complete=True)
    assert items.finish(is_complete=True) == [], "the last item has ended"
    is_open, seen = None, []
    for change in changes:
        match change:
            case Begun(item):
                assert is_open is None
                is_open = item
                seen.append(item)
            case Grown(item):
                assert item == is_open
            case Ended(item):
                assert item == is_open
                is_open = None
    assert is_open is None
    assert seen == items.items
    assert [int(item.split()[0]) for item in seen] == list(range(len(seen)))
    assert sum("call" in item for item in seen) == parts.count(CALL)
    kinds = [item.split()[1] for item in seen]
    assert all(first != second or first == "call" for first, second in pairwise(kinds))
