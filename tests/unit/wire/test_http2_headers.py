"""Compressed headers: the examples of RFC 7541, invalid headers, and limits on their size."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.wire.http2.header_blocks import BrokenHeaders, HeaderReader, write_headers

FIRST = [(":method", "GET"), (":scheme", "http"), (":path", "/"), (":authority", "www.example.com")]
SECOND = [*FIRST, ("cache-control", "no-cache")]
THIRD = [
    (":method", "GET"),
    (":scheme", "https"),
    (":path", "/index.html"),
    (":authority", "www.example.com"),
    ("custom-key", "custom-value"),
]
PLAIN = (
    "828684410f7777772e6578616d706c652e636f6d",
    "828684be58086e6f2d6361636865",
    "828785bf400a637573746f6d2d6b65790c637573746f6d2d76616c7565",
)
HUFFMAN = (
    "828684418cf1e3c2e5f23a6ba0ab90f4ff",
    "828684be5886a8eb10649cbf",
    "828785bf408825a849e95ba97d7f8925a849e95bb8e8b4bf",
)


def reader(max_list_bytes: int = 8192) -> HeaderReader:
    return HeaderReader(max_list_bytes)


@pytest.mark.parametrize("blocks", [PLAIN, HUFFMAN])
def test_the_examples_of_rfc_7541_are_decoded(blocks: tuple[str, ...]) -> None:
    """Appendix C.3 and C.4: three requests on one connection."""
    ours = reader()
    assert [ours.read(bytes.fromhex(block)) for block in blocks] == [FIRST, SECOND, THIRD]


def test_entries_that_exceed_the_table_are_evicted() -> None:
    ours = reader()
    for number in range(200):
        name = f"name-{number}".encode()
        ours.read(b"\x40" + bytes([len(name)]) + name + b"\x14" + b"v" * 20)
    assert ours.read(b"\xbe") == [("name-199", "v" * 20)]
    oldest = 61 + 4096 // (8 + 20 + 32)
    assert ours.read(b"\xff" + bytes([oldest - 127 | 0x80, 0])) == [(f"name-{200 - 4096 // 60}", "v" * 20)]
    with pytest.raises(BrokenHeaders, match="not in the table"):
        ours.read(b"\xff" + bytes([oldest + 1 - 127 | 0x80, 0]))


def test_the_table_may_shrink_and_not_grow_beyond_its_bound() -> None:
    ours = reader()
    ours.read(bytes.fromhex(PLAIN[0]))
    assert ours.read(b"\x20") == []
    with pytest.raises(BrokenHeaders, match="not in the table"):
        ours.read(b"\xbe")
    with pytest.raises(BrokenHeaders, match="larger than it may"):
        ours.read(b"\x3f\xe2\x1f")


def test_a_header_list_is_bounded_by_its_uncompressed_size() -> None:
    ours = reader(max_list_bytes=4096)
    assert ours.read(b"\x40\x01a\x7f\xd1\x0e" + b"v" * 2000) == [("a", "v" * 2000)]
    assert ours.read(b"\xbe\xbe\xbe") is None, "three bytes that stand for six thousand"
    assert ours.read(b"\xbe") == [("a", "v" * 2000)], "and the table is as it was"


def test_headers_beyond_the_bound_are_not_kept() -> None:
    """A block of the largest size with the shortest headers."""
    ours = reader(max_list_bytes=4096)
    block = b"\0\x01a\x01b" * 3_276
    tracemalloc.start()
    assert ours.read(block) is None
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 50_000


def test_a_compression_bomb_is_not_decoded_to_its_end() -> None:
    """Each of sixteen thousand bytes stands for four thousand bytes."""
    ours = reader(max_list_bytes=8192)
    entry = b"\x40\x01a\x7f\xa1\x1e" + b"v" * 4_000
    assert ours.read(entry) is not None
    with pytest.raises(BrokenHeaders, match="many times larger"):
        ours.read(b"\xbe" * 12_000)


def test_every_letter_is_decoded_from_its_huffman_code() -> None:
    """Appendix B: the code of each byte between others, padded with ones."""
    table = {0: (0x1FF8, 13), 48: (0x0, 5), 97: (0x3, 5), 32: (0x14, 6), 255: (0x3FFFFEE, 26), 249: (0xFFFFFFE, 28)}
    for letter, (code, length) in table.items():
        bits = f"00011{code:0{length}b}00011"
        bits += "1" * (-len(bits) % 8)
        data = int(bits, 2).to_bytes(len(bits) // 8, "big")
        assert reader().read(b"\x10\x01n" + bytes([0x80 | len(data)]) + data) == [("n", f"a{chr(letter)}a")]


@pytest.mark.parametrize(
    "block",
    [
        "80",  # entry 0
        "ff",  # a number that is cut off
        "ffffffffffff00",  # and one that is too large
        "400a6375",  # a string that is cut off
        "40018f81ff",  # the value is missing
        "0001618184",  # padding of zeros
        "00016184ffffffff",  # the mark of the end, spelled out
        "00016182ffff",  # a whole byte of padding
        "203fe11f20",  # a third size of the table
    ],
)
def test_invalid_headers_are_errors(block: str) -> None:
    with pytest.raises(BrokenHeaders):
        reader().read(bytes.fromhex(block))


NAMES = st.text("abcdefghijklmnopqrstuvwxyz-", min_size=1, max_size=200)
VALUES = st.text(st.characters(max_codepoint=255), max_size=300)


@given(st.lists(st.tuples(NAMES, VALUES), max_size=8))
def test_encoded_headers_are_decoded_unchanged(headers: list[tuple[str, str]]) -> None:
    assert reader(1 << 20).read(write_headers(headers)) == headers


@given(st.binary(max_size=200))
def test_any_bytes_are_decoded_or_refused(block: bytes) -> None:
    try:
        found = reader().read(block)
    except BrokenHeaders:
        return
    assert found is None or sum(len(name) + len(value) + 32 for name, value in found) <= 8192
