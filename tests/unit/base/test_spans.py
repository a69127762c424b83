"""Spans of prompts: their digests, and what of a prompt is text."""

from __future__ import annotations

import pytest

from baton.messages.spans import Span, digest_of_rows, has_rows, text_pieces

SPANS = (Span(2, 3, "a"), Span(5, 1, "b"), Span(8, 4, "c"))


@pytest.mark.parametrize(
    ("start", "stop", "pieces"),
    [
        (0, 15, [(0, 2), (6, 8), (12, 15)]),
        (0, 2, [(0, 2)]),
        (3, 7, [(6, 7)]),
        (2, 6, []),
        (9, 12, []),
        (12, 12, []),
        (1, 9, [(1, 2), (6, 8)]),
    ],
)
def test_text_is_what_is_in_no_span(start: int, stop: int, pieces: list[tuple[int, int]]) -> None:
    assert text_pieces(SPANS, start, stop) == pieces


def test_a_digest_covers_dtype_shape_and_bytes() -> None:
    rows = bytes(range(16))
    digests = [
        digest_of_rows("float32", 2, 2, rows),
        digest_of_rows("float32", 4, 1, rows),
        digest_of_rows("float32", 1, 4, rows),
        digest_of_rows("bfloat16", 4, 2, rows),
        digest_of_rows("float16", 4, 2, rows),
        digest_of_rows("float32", 2, 2, rows[::-1]),
    ]
    assert len(set(digests)) == len(digests)


def test_rows_have_the_size_of_their_span() -> None:
    assert has_rows(Span(0, 2, "a", "float32", bytes(24)), 3)
    assert has_rows(Span(0, 2, "a", "bfloat16", bytes(12)), 3)
    for wrong in (Span(0, 2, "a", "float32", bytes(23)), Span(0, 2, "a"), Span(0, 2, "a", "int8", bytes(6))):
        assert not has_rows(wrong, 3)
    assert Span(0, 2, "a", "float32", bytes(24)).without_rows() == Span(0, 2, "a")
