"""A model's reasoning is split off its answer, however the text was cut into pieces."""

from __future__ import annotations

import re
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.text.reasoning import MAX_SPACES, AnswerFinder, ReasoningCounter, ReasoningSplitter, opens_reasoning


def split(pieces: list[str], *, is_open: bool) -> tuple[str, str]:
    splitter = ReasoningSplitter(is_open=is_open)
    parts = [*map(splitter.push, pieces), splitter.finish()]
    assert splitter.finish() == ("", "")
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)


def naive(text: str, *, is_open: bool) -> tuple[str, str]:
    """The same with regular expressions over the whole text."""
    space = rf"\s{{0,{MAX_SPACES}}}"
    begun = re.match(rf"{space}<think>{space}", text)
    if begun is None and not is_open:
        return "", text
    body = text[begun.end() :] if begun else re.sub(rf"\A{space}", "", text)
    found = re.search("</think>", body)
    if found is None:
        return body, ""
    return (
        re.sub(rf"{space}\Z", "", body[: found.start()])
        if len(body[: found.start()]) - len(body[: found.start()].rstrip()) <= MAX_SPACES
        else body[: found.start() - MAX_SPACES],
        re.sub(rf"\A{space}", "", body[found.end() :]),
    )


PIECES = st.lists(
    st.sampled_from(
        ["<think>", "</think>", "<", "</", "think>", "/", " ", "\n", " " * 63, "\n" * 70, "so", "é", "<t", "</t"]
    )
)


@pytest.mark.parametrize(
    ("text", "is_open", "expected"),
    [
        ("<think>\nso\n</think>\n\nHi", False, ("so", "Hi")),
        ("so\n</think>\n\nHi", True, ("so", "Hi")),
        ("<think>so</think>Hi", True, ("so", "Hi")),
        ("\n<think></think>Hi", False, ("", "Hi")),
        ("Hi <think>so</think>", False, ("", "Hi <think>so</think>")),
        ("<think>so", False, ("so", "")),
        ("so </thin", True, ("so </thin", "")),
        ("<think>a</think>b</think>c", False, ("a", "b</think>c")),
        ("<thin", False, ("", "<thin")),
        (" ", False, ("", " ")),
    ],
)
def test_reasoning_is_what_stands_before_the_end_marker(text: str, is_open: bool, expected: tuple[str, str]) -> None:
    assert split([text], is_open=is_open) == split(list(text), is_open=is_open) == expected


@given(PIECES, st.booleans())
def test_any_cuts_give_the_parts_of_the_whole_text(pieces: list[str], is_open: bool) -> None:
    text = "".join(pieces)
    assert split(pieces, is_open=is_open) == split(list(text), is_open=is_open) == naive(text, is_open=is_open)


@given(PIECES, st.booleans())
def test_the_answer_is_found_and_nothing_before_it_is_left_out(pieces: list[str], is_open: bool) -> None:
    finder = AnswerFinder(is_open=is_open)
    parts = [*map(finder.push, pieces), finder.finish(), finder.finish()]
    before, answer = ("".join(part[place] for part in parts) for place in (0, 1))
    assert before + answer == "".join(before + answer for before, answer in parts) == "".join(pieces)
    assert answer == naive("".join(pieces), is_open=is_open)[1]


@given(PIECES, st.booleans())
def test_no_more_than_a_marker_is_held(pieces: list[str], is_open: bool) -> None:
    splitter = ReasoningSplitter(is_open=is_open)
    for piece in pieces:
        splitter.push(piece)
        assert len(splitter._held) <= MAX_SPACES + len("</think>")


@pytest.mark.parametrize(
    ("prompt", "opens"),
    [("Hi<think>\n", True), ("Hi<think>", True), ("<think>\n\n</think>\n\n", False), ("Hi", False), ("", False)],
)
def test_a_prompt_may_open_the_reasoning(prompt: str, opens: bool) -> None:
    assert opens_reasoning(prompt) is opens


@given(PIECES, st.randoms(use_true_random=False), st.integers(1, 5))
def test_tokens_of_reasoning_are_counted_alike_however_they_come(pieces: list[str], rng: Random, size: int) -> None:
    text = "".join(pieces).encode()
    cuts = sorted({0, len(text), *(rng.randrange(len(text) + 1) for _ in range(len(text) // 2))})
    tokens = [text[first:last] for first, last in pairwise(cuts)]
    ends = [place for place in range(len(tokens) + 1) if b"</think>" in b"".join(tokens[:place])]
    counter = ReasoningCounter(tokens.__getitem__)
    for first in range(0, len(tokens), size):
        counter.push(range(first, min(first + size, len(tokens))))
    assert counter.num_tokens == (ends[0] if ends else len(tokens))


@pytest.mark.parametrize("is_open", [False, True])
def test_a_text_has_reasoning_if_it_begins_with_it(is_open: bool) -> None:
    for text in ("Hi", " <think>Hi", "<think></think>", "x<think>", "</think>", "<thin", "  "):
        splitter = ReasoningSplitter(is_open=is_open)
        for letter in text:
            splitter.push(letter)
        splitter.finish()
        assert splitter.has_reasoning == (is_open or text.strip().startswith("<think>")), text
