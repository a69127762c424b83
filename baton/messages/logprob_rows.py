"""Log-probabilities of many tokens in one piece of memory.

As objects, one token with 20 alternatives takes 3,300 bytes in 64 objects, and the garbage collector visits each of
them; here it takes 176 bytes in one object. A row has the token's id, log-probability, rank and the number of its
alternatives, and then id and log-probability of each alternative: four bytes each, little-endian. Log-probabilities are
of 32 bits, as on the wire.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain
from typing import overload

from baton.messages.sampling import TokenLogprobs

HEAD_BYTES = 16
"""Bytes of a row without alternatives."""
TOP_BYTES = 8
"""Bytes of each alternative."""
_NUM_TOP_AT = 12
BLOCK_ROWS = 64
"""So many log-probabilities of a log are joined to one block, and forgotten together."""
_LARGEST = 3.4028234663852886e38
_FIRST = (0, 0)
"""The first row begins at 0."""


def row_bytes(num_top: int) -> int:
    """Bytes of one token's row with so many alternatives."""
    return HEAD_BYTES + TOP_BYTES * num_top


@lru_cache(maxsize=64)
def _row(num_top: int) -> struct.Struct:
    return struct.Struct("<IfII" + "If" * num_top)


class LogprobRows(Sequence[TokenLogprobs]):
    """An immutable sequence of log-probabilities, packed as rows. A slice is packed, too.

    Rows that differ in length are found by reading the heads of those before them. A look-up goes on from the one
    before it, so slices in ascending order read each head once.
    """

    __slots__ = ("_data", "_found", "_num", "_width")

    def __init__(self, data: bytes, num: int, width: int) -> None:
        """`data` has `num` rows of `width` bytes each; 0: they differ in length."""
        self._data = data
        self._num = num
        self._width = width
        self._found = _FIRST
        """The place of the row that was looked up last, and where it begins, if rows differ in length."""

    @classmethod
    def of(cls, positions: Iterable[TokenLogprobs]) -> LogprobRows:
        """Pack these positions."""
        if isinstance(positions, LogprobRows):
            return positions
        return cls.of_rows([_packed(position) for position in positions])

    @classmethod
    def of_rows(cls, rows: Sequence[bytes]) -> LogprobRows:
        """The sequence of these rows, each made by `packed_row`."""
        widths = {len(row) for row in rows}
        return cls(b"".join(rows), len(rows), widths.pop() if len(widths) == 1 else 0)

    @classmethod
    def joined(cls, parts: Sequence[LogprobRows]) -> LogprobRows:
        """The rows of all parts, which are copied."""
        widths = {part._width for part in parts if part._num}
        data, num = b"".join([part._data for part in parts]), sum(part._num for part in parts)
        return cls(data, num, widths.pop() if len(widths) == 1 else 0)

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows."""
        return len(self._data)

    @property
    def num_values(self) -> int:
        """Number of log-probabilities: one for each token and one for each alternative."""
        return (len(self._data) - TOP_BYTES * self._num) // TOP_BYTES

    def logprobs(self) -> Sequence[float]:
        """The log-probability of each token alone, which is quicker than reading the rows."""
        if self._width:
            return memoryview(self._data).cast("f")[1 :: self._width // 4].tolist()
        return [position.logprob for position in self]

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[TokenLogprobs]:
        at = 0
        for _ in range(self._num):
            position, at = self._read(at)
            yield position

    @overload
    def __getitem__(self, index: int) -> TokenLogprobs: ...

    @overload
    def __getitem__(self, index: slice) -> LogprobRows: ...

    def __getitem__(self, index: int | slice) -> TokenLogprobs | LogprobRows:
        if isinstance(index, slice):
            first, stop, step = index.indices(self._num)
            if step != 1:
                return LogprobRows.of(list(self)[index])
            if first == 0 and stop == self._num:
                return self
            stop = max(first, stop)
            begin = self._offset(first)
            return LogprobRows(self._data[begin : self._offset(stop)], stop - first, self._width)
        position = index + self._num if index < 0 else index
        if not 0 <= position < self._num:
            raise IndexError("no such position")
        return self._read(self._offset(position))[0]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, LogprobRows):
            return self._num == other._num and self._data == other._data
        if not isinstance(other, Sequence):
            return NotImplemented
        return self._num == len(other) and all(row == other_row for row, other_row in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"LogprobRows.of({list(self)})"

    def _offset(self, position: int) -> int:
        """Where a row begins, or behind the last one, where it ends."""
        if self._width:
            return position * self._width
        known, at = self._found
        if position < known:
            known, at = _FIRST
        for _ in range(known, position):
            at += row_bytes(self._num_top(at))
        self._found = position, at
        return at

    def _num_top(self, at: int) -> int:
        return int.from_bytes(self._data[at + _NUM_TOP_AT : at + HEAD_BYTES], "little")

    def _read(self, at: int) -> tuple[TokenLogprobs, int]:
        """The row that begins there, and where the next one does."""
        row = _row(self._num_top(at))
        token_id, logprob, rank, _, *top = row.unpack_from(self._data, at)
        return TokenLogprobs(token_id, logprob, rank, list(zip(top[::2], top[1::2], strict=True))), at + row.size


def packed_row(token_id: int, logprob: float, rank: int, top: Sequence[float]) -> bytes:
    """One row. `top`: the token id and the log-probability of each alternative, one after the other."""
    num_top = len(top) // 2
    return _row(num_top).pack(token_id, logprob, rank, num_top, *top)


def _packed(position: TokenLogprobs) -> bytes:
    token_id, logprob, rank = position.token_id, position.logprob, position.rank
    try:
        return packed_row(token_id, logprob, rank, list(chain.from_iterable(position.top)))
    except OverflowError:  # a number that 32 bits do not hold is infinite there, as in a message
        top = [(token, _in_32_bits(value)) for token, value in position.top]
        return packed_row(token_id, _in_32_bits(logprob), rank, list(chain.from_iterable(top)))


def _in_32_bits(value: float) -> float:
    if value > _LARGEST:
        return float("inf")
    return float("-inf") if value < -_LARGEST else value


def logprobs_alone(positions: Sequence[TokenLogprobs]) -> Sequence[float]:
    """The log-probability of each token, without its alternatives."""
    if isinstance(positions, LogprobRows):
        return positions.logprobs()
    return [position.logprob for position in positions]


def joined_logprobs(parts: Iterable[Sequence[TokenLogprobs]]) -> Sequence[TokenLogprobs]:
    """The log-probabilities of all parts. They are packed if those of all parts are."""
    filled = [part for part in parts if part]
    if not filled:
        return ()
    rows = [part for part in filled if isinstance(part, LogprobRows)]
    if len(rows) < len(filled):
        return tuple(chain.from_iterable(filled))
    return rows[0] if len(rows) == 1 else LogprobRows.joined(rows)


class LogprobLog:
    """Log-probabilities that grow by a few with each step. They are joined to blocks, which are packed if they are.

    However long the parts are with which they come, all blocks have the same length: so a log that forgets the oldest
    ones keeps fewer than `BLOCK_ROWS` more than it is to keep.
    """

    __slots__ = ("_blocks", "_latest", "_num", "_num_latest", "num_forgotten")

    def __init__(self) -> None:
        self._blocks: list[Sequence[TokenLogprobs]] = []
        self._latest: list[Sequence[TokenLogprobs]] = []
        """Parts that are not joined yet; together shorter than a block."""
        self._num_latest = 0
        self._num = 0
        self.num_forgotten = 0
        """How many of the oldest ones are forgotten."""

    def __len__(self) -> int:
        return self._num

    def append(self, part: Sequence[TokenLogprobs]) -> None:
        """Add the next log-probabilities."""
        self._num += len(part)
        self._num_latest += len(part)
        self._latest.append(part)
        if self._num_latest >= BLOCK_ROWS:
            self._join()

    def _join(self) -> None:
        latest = joined_logprobs(self._latest)
        rest = self._num_latest % BLOCK_ROWS
        last = len(latest) - rest
        self._blocks += [latest[first : first + BLOCK_ROWS] for first in range(0, last, BLOCK_ROWS)]
        self._latest, self._num_latest = [latest[last:]] if rest else [], rest

    def forget_before_last(self, num: int) -> None:
        """Forget the oldest ones, a block at a time, so that the last `num` remain."""
        count = max(0, self._num - num) // BLOCK_ROWS
        if count:
            del self._blocks[:count]
            self._num -= count * BLOCK_ROWS
            self.num_forgotten += count * BLOCK_ROWS

    def whole(self) -> Sequence[TokenLogprobs]:
        """All that is kept."""
        return joined_logprobs([*self._blocks, *self._latest])
