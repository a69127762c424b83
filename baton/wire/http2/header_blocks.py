"""Headers as HTTP/2 compresses them (RFC 7541): a reader of everything, and a writer that compresses next to nothing.

What is read comes from strangers. So a list of headers is bounded by what it would be written out: one byte may stand
for four thousand.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache

Header = tuple[str, str]

TABLE_BYTES = 4096
_MAX_RESIZES = 2
"""Of the table, in one block: to its smallest size and to its last one (RFC 7541, 4.2)."""
_BOMB_LISTS, _BOMB_EXPANSION = 8, 10
"""A list so many times larger than it may be, and than it was sent, is not read to its end."""
_ENTRY_BYTES = 32
"""What RFC 7541 adds to each entry's size."""
_STATIC: Sequence[Header] = (
    (":authority", ""),
    (":method", "GET"),
    (":method", "POST"),
    (":path", "/"),
    (":path", "/index.html"),
    (":scheme", "http"),
    (":scheme", "https"),
    *((":status", status) for status in ("200", "204", "206", "304", "400", "404", "500")),
    ("accept-charset", ""),
    ("accept-encoding", "gzip, deflate"),
    *(
        (name, "")
        for name in (
            *("accept-language", "accept-ranges", "accept", "access-control-allow-origin", "age", "allow"),
            *("authorization", "cache-control", "content-disposition", "content-encoding", "content-language"),
            *("content-length", "content-location", "content-range", "content-type", "cookie", "date", "etag"),
            *("expect", "expires", "from", "host", "if-match", "if-modified-since", "if-none-match", "if-range"),
            *("if-unmodified-since", "last-modified", "link", "location", "max-forwards", "proxy-authenticate"),
            *("proxy-authorization", "range", "referer", "refresh", "retry-after", "server", "set-cookie"),
            *("strict-transport-security", "transfer-encoding", "user-agent", "vary", "via", "www-authenticate"),
        )
    ),
)
_CODE_LENGTHS = bytes.fromhex(
    "0d171c1c1c1c1c1c1c181e1c1c1e1c1c1c1c1c1c1c1c1e1c1c1c1c1c1c1c1c1c060a0a0c0d06080b0a0a080b0806060605050506"
    "06060606060607080f060c0a0d06070707070707070707070707070707070707070707070807080d130d0e060f05060506050606"
    "060507070606060506070605050607070707070f0b0e0d1c14161414161616171617171717171817181816171817171717151617"
    "1617171816151416161717151716161815161717151516151716171714161616171616171a1a1413161716191a1a1a1b1b1a1819"
    "13151a1b1b1a1b1815151a1a1c1b1b1b14181415161515171616191918181a171a1b1a1a1b1b1b1b1b1c1b1b1b1b1b1a1e"
)
"""Bits of each byte in Huffman's code, and of the mark of its end. Codes of one length follow in the order of bytes."""


class BrokenHeaders(ValueError):
    """Bytes that are no headers: the connection can't go on, since its table may be wrong now."""


class HeaderReader:
    """One connection's headers, in the order in which they come."""

    __slots__ = ("_max_list_bytes", "_max_table_bytes", "_table", "_table_bytes")

    def __init__(self, max_list_bytes: int) -> None:
        """`max_list_bytes`: of one list, each header 32 bytes larger than it is."""
        self._max_list_bytes = max_list_bytes
        self._table: list[Header] = []
        """The newest first. A list: an empty deque takes 760 bytes of each connection, and these are at most 128."""
        self._table_bytes = 0
        self._max_table_bytes = TABLE_BYTES

    def read(self, block: bytes) -> list[Header] | None:
        """The headers; None where they are too many or too large. Raises BrokenHeaders."""
        headers: list[Header] = []
        left, at, end = self._max_list_bytes, 0, len(block)
        bomb_bytes = max(_BOMB_LISTS * self._max_list_bytes, _BOMB_EXPANSION * end)
        num_resizes = 0
        try:
            while at < end:
                first = block[at]
                if first & 0x80:
                    index, at = _number(block, at, 7)
                    header = self._entry(index)
                elif first & 0xE0 == 0x20:
                    if left < self._max_list_bytes:
                        raise BrokenHeaders("the table's size is changed behind a header")
                    num_resizes += 1
                    if num_resizes > _MAX_RESIZES:
                        raise BrokenHeaders("the table's size is changed again and again")
                    size, at = _number(block, at, 5)
                    self._resize(size)
                    continue
                else:
                    index, at = _number(block, at, 6 if first & 0x40 else 4)
                    if index:
                        name = self._entry(index)[0]
                    else:
                        name, at = _string(block, at)
                    value, at = _string(block, at)
                    header = (name, value)
                    if first & 0x40:
                        self._remember(header)
                left -= _size(header)
                if left >= 0:
                    headers.append(header)
                elif self._max_list_bytes - left > bomb_bytes:
                    raise BrokenHeaders("they are many times larger than they may be")
        except IndexError:
            raise BrokenHeaders("they end too early") from None
        return headers if left >= 0 else None

    def _entry(self, index: int) -> Header:
        if 1 <= index <= len(_STATIC):
            return _STATIC[index - 1]
        index -= len(_STATIC) + 1
        if not 0 <= index < len(self._table):
            raise BrokenHeaders("one is not in the table")
        return self._table[index]

    def _remember(self, header: Header) -> None:
        self._table.insert(0, header)
        self._table_bytes += _size(header)
        self._make_fit()

    def _resize(self, size: int) -> None:
        if size > TABLE_BYTES:
            raise BrokenHeaders("the table would be larger than it may")
        self._max_table_bytes = size
        self._make_fit()

    def _make_fit(self) -> None:
        while self._table_bytes > self._max_table_bytes:
            self._table_bytes -= _size(self._table.pop())


def write_headers(headers: Iterable[Header]) -> bytes:
    """Any headers, in the form that no table remembers. Names in small letters, both in latin-1."""
    return b"".join(b"\0" + _literal(name) + _literal(value) for name, value in headers)


def _literal(text: str) -> bytes:
    data = text.encode("latin-1")
    return _written_number(len(data)) + data


def _written_number(value: int) -> bytes:
    """With seven bits in the first byte, whose first bit is 0."""
    if value < 0x7F:
        return bytes((value,))
    value -= 0x7F
    written = bytearray((0x7F,))
    while value >= 0x80:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    written.append(value)
    return bytes(written)


def _size(header: Header) -> int:
    return len(header[0]) + len(header[1]) + _ENTRY_BYTES


def _number(block: bytes, at: int, bits: int) -> tuple[int, int]:
    """A number and where it ends."""
    most = (1 << bits) - 1
    value = block[at] & most
    at += 1
    if value < most:
        return value, at
    for shift in range(0, 28, 7):
        byte = block[at]
        at += 1
        value += (byte & 0x7F) << shift
        if not byte & 0x80:
            return value, at
    raise BrokenHeaders("a number is too large")


def _string(block: bytes, at: int) -> tuple[str, int]:
    is_huffman = block[at] & 0x80
    length, at = _number(block, at, 7)
    data = block[at : at + length]
    if len(data) < length:
        raise BrokenHeaders("they end too early")
    return _huffman(data) if is_huffman else data.decode("latin-1"), at + length


def _huffman(data: bytes) -> str:
    """Four bits at a time: strangers may send as much of it as they like."""
    steps, ends = _huffman_machine()
    text = bytearray()
    state = 0
    for byte in data:
        for four in (byte >> 4, byte & 0xF):
            state, letter = steps[state][four]
            if letter is not None:
                if letter == _END:
                    raise BrokenHeaders("the mark of the end is no letter")
                text.append(letter)
    if state not in ends:
        raise BrokenHeaders("a string does not end as it should")
    return text.decode("latin-1")


_END = 256
_MOST_PADDING = 7
"""Bits."""
_Prefix = tuple[int, int]
"""Bits of a code that is not whole yet, and how many."""


@cache
def _huffman_machine() -> tuple[Sequence[Sequence[tuple[int, int | None]]], frozenset[int]]:
    """For each state and each four bits the next state and the letter that ended; and where a string may end.

    No code is shorter than five bits, so that four never end two letters.
    """
    codes = _huffman_codes()
    states: dict[_Prefix, int] = {(0, 0): 0}
    prefixes = list(states)
    steps: list[list[tuple[int, int | None]]] = []
    for prefix in prefixes:
        row = []
        for four in range(16):
            after, letter = _walked(codes, prefix, four)
            if after not in states:
                states[after] = len(states)
                prefixes.append(after)
            row.append((states[after], letter))
        steps.append(row)
    ends = (states.get(((1 << length) - 1, length)) for length in range(_MOST_PADDING + 1))
    return steps, frozenset(state for state in ends if state is not None)


def _walked(codes: Mapping[_Prefix, int], prefix: _Prefix, four: int) -> tuple[_Prefix, int | None]:
    letter = None
    for bit in (3, 2, 1, 0):
        prefix = (prefix[0] << 1 | four >> bit & 1, prefix[1] + 1)
        if prefix in codes:
            prefix, letter = (0, 0), codes[prefix]
            if letter == _END:
                break
    return prefix, letter


def _huffman_codes() -> Mapping[_Prefix, int]:
    codes: dict[_Prefix, int] = {}
    code = last = 0
    for length, symbol in sorted((length, symbol) for symbol, length in enumerate(_CODE_LENGTHS)):
        code <<= length - last
        codes[code, length] = symbol
        code, last = code + 1, length
    return codes
