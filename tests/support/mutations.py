"""Mutates valid bytes for fuzz tests."""

from __future__ import annotations

from hypothesis import strategies as st


def mutated(draw: st.DrawFn, good: bytes, longest: int, junk: st.SearchStrategy[bytes]) -> bytes:
    """Return the bytes with a few changes: bits flipped, up to `longest` bytes cut or repeated, or junk inserted."""
    data = bytearray(good)
    for _ in range(draw(st.integers(1, 4))):
        place, size = draw(st.integers(0, len(data))), draw(st.integers(0, longest))
        kind = draw(st.sampled_from(["flip", "cut", "repeat", "insert"]))
        if kind == "flip" and place < len(data):
            data[place] ^= 1 << draw(st.integers(0, 7))
        elif kind == "cut":
            del data[place : place + size]
        elif kind == "repeat":
            data[place:place] = data[place : place + size]
        else:
            data[place:place] = draw(junk)
    return bytes(data)
