"""Headers of an HTTP/2 answer, as a server writes them that may keep no table."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.bench.hpack import BrokenHeaders, read_headers

TEXT = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=400)


def number(value: int, bits: int, first: int) -> bytes:
    """RFC 7541, 5.1."""
    most = (1 << bits) - 1
    if value < most:
        return bytes([first | value])
    rest, out = value - most, [first | most]
    while rest >= 128:
        out.append(rest % 128 + 128)
        rest //= 128
    return bytes([*out, rest])


def string(text: str) -> bytes:
    return number(len(text), 7, 0) + text.encode()


@given(st.dictionaries(TEXT.filter(bool), TEXT, max_size=4), st.integers(0, 3))
def test_literals_of_any_length_are_read(headers: dict[str, str], kind: int) -> None:
    first = (0x00, 0x10, 0x40, 0x40)[kind]  # not indexed, never indexed, indexed
    fields = b"".join(bytes([first]) + string(name) + string(value) for name, value in headers.items())
    assert read_headers(b"\x20" + fields) == headers
    assert read_headers(number(4096, 5, 0x20) + fields) == headers


@pytest.mark.parametrize("length", [126, 127, 128, 254, 255, 256, 3000])
def test_a_length_may_take_several_bytes(length: int) -> None:
    assert read_headers(b"\0" + string("name") + string("x" * length)) == {"name": "x" * length}


def test_names_may_be_of_the_table() -> None:
    assert read_headers(b"\x88") == {":status": "200"}
    assert read_headers(number(31, 4, 0) + string("application/grpc")) == {"content-type": "application/grpc"}
    assert read_headers(number(61, 4, 0) + string("x")) == {"www-authenticate": "x"}
    with pytest.raises(BrokenHeaders, match="field 62"):
        read_headers(number(62, 7, 0x80))


@given(st.binary(max_size=60))
def test_bytes_are_headers_or_broken(data: bytes) -> None:
    try:
        read_headers(data)
    except BrokenHeaders:
        return


def test_headers_that_end_early_are_broken() -> None:
    whole = b"\0" + string("grpc-status") + string("0")
    for end in range(1, len(whole)):
        with pytest.raises(BrokenHeaders):
            read_headers(whole[:end])
