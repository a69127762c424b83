"""Text that repeats itself is found, and text with equal parts that goes on is not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.text.ends import repeated_end

LETTERS = st.text("abc \n", min_size=1, max_size=512)


@pytest.mark.parametrize(
    "unit",
    ["Luxury ", "- 1 teaspoon of cinnamon\n", "He was a little ball of fluff, and ", "x" * 511 + "y", "好"],
)
def test_a_loop_is_found_wherever_it_is_cut(unit: str) -> None:
    loop = unit * (512 // len(unit) + 7)
    for cut in range(len(unit)):
        found = repeated_end("It begins well. " + loop[: len(loop) - cut])
        assert (len(found), sorted(found)) == (len(unit), sorted(unit))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        "-" * 500,
        "| 0 | 0 | 0 |\n" * 30,
        "".join(f"{number}. a step\n" for number in range(500)),
        "x" * 2000 + "!",
        ("y" * 512 + "z") * 20,
        ("a verse of a song " * 12 + "chorus\n") * 5,
    ],
)
def test_other_text_is_not_a_loop(text: str) -> None:
    assert repeated_end(text) == ""


@given(LETTERS, LETTERS)
def test_what_is_found_repeats(start: str, unit: str) -> None:
    text = start + unit * max(6, -(-512 // len(unit)))
    found = repeated_end(text)
    assert found
    assert len(found) <= len(unit)
    assert text.endswith(found * 6)
    assert text.endswith(found * (512 // len(found)))
