"""The words of a transcript, out of tokens and their times."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from router.http.audio.formats import words_of


@pytest.mark.parametrize(
    ("language", "tokens", "expected"),
    [
        ("en", [" He", "llo", " you"], ["Hello", "you"]),
        ("en", [" Hello", ",", " you", "."], ["Hello,", "you."]),
        ("en", ['"', "Yes", '"', " (", "no", ")", " -", "all"], ['"Yes"', "(no)", "-all"]),
        ("en", [" don", "'t", " 3", "."], ["don't", "3."]),
        ("de", [" ", " ja"], ["ja"]),
        ("fr", [" caf", b"\xc3", b"\xa9", " noir"], ["café", "noir"]),
        ("ja", ["今日", b"\xe3\x81", b"\xaf", "雨", "。"], ["今日", "は", "雨。"]),
        ("yue", [" a", "b"], ["a", "b"]),
        ("en", [" a", b"\xff", b"\xe2\x82"], ["a\ufffd\ufffd"]),
        ("en", [], []),
    ],
)
def test_tokens_become_words(language: str, tokens: Sequence[str | bytes], expected: Sequence[str]) -> None:
    spellings = [token.encode() if isinstance(token, str) else token for token in tokens]
    times = [place / 10 for place in range(len(tokens) + 1)]
    assert [word.text for word in words_of(spellings, times, language)] == expected


def test_words_have_the_times_of_their_tokens_and_pauses_are_left_out() -> None:
    tokens = [b" One", b" t", b"wo", b".", b" Three", b" four"]
    times = [3.0, 8.0, 8.12, 8.3, 12.3, 16.2, 16.5]
    found = [(word.text, word.start_s, word.end_s) for word in words_of(tokens, times, "en")]
    # The longest that a word beside a pause may be is 1.4 s: twice 0.7 s, since the median is longer.
    assert found == [("One", 6.6, 8.0), ("two.", 8.0, 8.3), ("Three", 14.8, 16.2), ("four", 16.2, 16.5)]
