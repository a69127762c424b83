"""Packed log-probabilities: equal to those that were packed, and few objects."""

from __future__ import annotations

import gc
import math
import sys
from typing import Any, SupportsIndex

import pytest

from baton.messages.generation import Chunk, joined
from baton.messages.logprob_rows import BLOCK_ROWS, LogprobLog, LogprobRows, joined_logprobs, logprobs_alone, row_bytes
from baton.messages.sampling import TokenLogprobs
from baton.wire.codec.generation import chunk_to_pb, event_from_pb
from baton.wire.codec.sampling import logprobs_from_pb, logprobs_to_pb
from router.flight.flight_sequence import OutputMerge

EQUAL = [TokenLogprobs(7 * n, -0.5 * n, n + 1, [(n, -0.25), (n + 1, float("-inf"))]) for n in range(9)]
RAGGED = [TokenLogprobs(2**32 - 1, -1.5, 3, [(n, -0.5 * n) for n in range(count)]) for count in (2, 0, 5, 1, 0)]


@pytest.mark.parametrize("positions", [EQUAL, RAGGED, EQUAL[:1], []])
def test_rows_are_the_positions_that_were_packed(positions: list[TokenLogprobs]) -> None:
    rows = LogprobRows.of(positions)
    assert rows == positions
    assert rows.logprobs() == logprobs_alone(positions)
    assert rows.num_values == sum(1 + len(position.top) for position in positions)
    assert rows.num_bytes == sum(row_bytes(len(position.top)) for position in positions)
    assert logprobs_from_pb(logprobs_to_pb(rows)) == positions
    for first in range(-1, len(positions) + 1):
        for last in range(first, len(positions) + 2):
            assert rows[first:last] == positions[first:last]
    assert [rows[place] for place in range(-len(rows), len(rows))] == [*positions, *positions]
    with pytest.raises(IndexError):
        rows[len(positions)]


class CountedBytes(bytes):
    """Bytes that count how often something is read from them."""

    num_reads = 0

    def __getitem__(self, place: SupportsIndex | slice) -> Any:
        self.num_reads += 1
        return super().__getitem__(place)


def test_rows_of_different_lengths_are_divided_in_one_pass() -> None:
    positions = RAGGED * 40
    data = CountedBytes(b"".join(LogprobRows.of([position])._data for position in positions))
    merge, rows = OutputMerge(), LogprobRows(data, len(positions), 0)
    run = merge.add(0, [position.token_id for position in positions], rows)
    assert run is not None
    assert run.logprobs == positions
    assert data.num_reads <= 2 * len(positions), "each row's head, and the row"


def test_a_chunk_of_joined_rows_goes_over_the_wire_as_it_is() -> None:
    parts = [EQUAL, RAGGED, EQUAL[3:]]
    chunks = [Chunk(9, [1] * len(part), "a", LogprobRows.of(part)) for part in parts]
    whole = joined(chunks)
    assert isinstance(whole.logprobs, LogprobRows)
    assert event_from_pb(chunk_to_pb(whole, "r")) == Chunk(9, [1] * 20, "aaa", [*EQUAL, *RAGGED, *EQUAL[3:]])
    assert joined_logprobs([EQUAL, LogprobRows.of(RAGGED)]) == (*EQUAL, *RAGGED)


def test_what_32_bits_do_not_hold_is_infinite_as_in_a_message() -> None:
    (position,) = LogprobRows.of([TokenLogprobs(1, -1e300, 1, [(2, math.nan)])])
    assert position.logprob == float("-inf")
    assert math.isnan(position.top[0][1])


def test_a_long_output_is_few_objects_and_no_more_bytes_than_its_rows() -> None:
    positions = [TokenLogprobs(1, -0.5, 1, [(token, -0.5) for token in range(20)])]
    message, log, num_tokens = logprobs_to_pb(positions), LogprobLog(), 6400
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(num_tokens):
        log.append(logprobs_from_pb(message))
    gc.collect()
    assert len(gc.get_objects()) - before < num_tokens / 32
    rows = log.whole()
    assert isinstance(rows, LogprobRows)
    assert rows.num_bytes == num_tokens * row_bytes(20) == num_tokens * 176
    assert sys.getsizeof(rows) < 100


@pytest.mark.parametrize("size", [1, 7, 500])
def test_a_log_forgets_only_what_lies_before_the_last_ones_however_long_its_parts_are(size: int) -> None:
    log = LogprobLog()
    for first in range(0, 1001, size):
        log.append(LogprobRows.of([TokenLogprobs(token, -0.5, 1, ()) for token in range(first, first + size)]))
        log.forget_before_last(100)
        assert min(first + size, 100) <= len(log) < 100 + BLOCK_ROWS
        assert log.num_forgotten + len(log) == first + size
        assert [one.token_id for one in log.whole()] == list(range(log.num_forgotten, first + size))
