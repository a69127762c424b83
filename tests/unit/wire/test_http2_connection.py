"""The server end of an HTTP/2 connection: what peers may send, what they may not, and what waits for their windows."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.wire.http2.frames import (
    ENHANCE_YOUR_CALM,
    FLOW_CONTROL_ERROR,
    PREFACE,
    PROTOCOL_ERROR,
    STREAM_CLOSED,
    ConnectionFault,
)
from baton.wire.http2.header_blocks import write_headers
from baton.wire.http2.server_connection import (
    DataReceived,
    Event,
    RequestReceived,
    ServerConnection,
    StreamReset,
    StreamWritable,
)
from tests.support.http2_frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HAS_PRIORITY,
    HEADERS,
    PADDED,
    PING,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    body_of,
    first_window,
    frame,
    parse_frames,
    window_update,
)

REQUEST = [(":method", "POST"), (":scheme", "http"), (":path", "/x")]
BLOCK = write_headers(REQUEST)
TRAILERS = b"\x00\x01t\x01v"


def request_headers(stream: int, flags: int = 0) -> bytes:
    return frame(HEADERS, END_HEADERS | flags, stream, BLOCK)


def connected(window: int | None = None) -> ServerConnection:
    """Return a connection after the exchange of settings."""
    connection = ServerConnection(8192)
    settings = frame(SETTINGS, 0, 0) if window is None else first_window(window)
    assert connection.receive(PREFACE + settings) == []
    connection.take()
    return connection


def fault_of(connection: ServerConnection, data: bytes) -> int:
    """Return the error code with which these bytes end the connection; the peer gets it, too."""
    with pytest.raises(ConnectionFault) as caught:
        connection.receive(data)
    *_, (kind, _, _, payload) = parse_frames(connection.take())
    assert kind == GOAWAY
    assert int.from_bytes(payload[4:], "big") == caught.value.code
    return caught.value.code


def test_a_request_is_received_and_answered() -> None:
    connection = connected()
    events = connection.receive(request_headers(1) + frame(DATA, 0, 1, b"ab") + frame(DATA, END_STREAM, 1, b"c"))
    assert events == [RequestReceived(1, REQUEST, False), DataReceived(1, b"ab", False), DataReceived(1, b"c", True)]
    connection.send_headers(1, b"h")
    assert connection.send(1, b"body")
    connection.finish(1, TRAILERS)
    assert parse_frames(connection.take()) == [
        (HEADERS, END_HEADERS, 1, b"h"),
        (DATA, 0, 1, b"body"),
        (HEADERS, END_HEADERS | END_STREAM, 1, TRAILERS),
    ]
    assert connection.num_open == 0


def test_settings_and_pings_are_acknowledged() -> None:
    connection = ServerConnection(8192)
    assert [kind for kind, *_ in parse_frames(connection.take())] == [SETTINGS, WINDOW_UPDATE]
    connection.receive(PREFACE + frame(SETTINGS, 0, 0) + frame(PING, 0, 0, b"12345678"))
    assert parse_frames(connection.take()) == [(SETTINGS, ACK, 0, b""), (PING, ACK, 0, b"12345678")]


def test_padding_priorities_and_continuations_are_decoded() -> None:
    connection = connected()
    padded = frame(HEADERS, PADDED | HAS_PRIORITY, 1, b"\x02" + b"\0\0\0\0\x10" + BLOCK[:3] + b"\0\0")
    rest = frame(CONTINUATION, 0, 1, BLOCK[3:5]) + frame(CONTINUATION, END_HEADERS, 1, BLOCK[5:])
    assert connection.receive(padded + rest) == [RequestReceived(1, REQUEST, False)]
    assert connection.receive(frame(DATA, PADDED, 1, b"\x03abc\0\0\0")) == [DataReceived(1, b"abc", False)]
    assert connection.receive(frame(HEADERS, END_HEADERS | END_STREAM, 1, TRAILERS)) == [DataReceived(1, b"", True)]


def test_an_early_answer_asks_the_peer_to_stop_sending() -> None:
    connection = connected()
    connection.receive(request_headers(1))
    connection.finish(1, TRAILERS)
    assert [kind for kind, *_ in parse_frames(connection.take())] == [HEADERS, RST_STREAM]
    assert connection.receive(frame(DATA, 0, 1, b"was under way")) == []


def test_data_beyond_the_window_waits_in_order_before_the_trailers() -> None:
    connection = connected(window=10)
    connection.receive(request_headers(1, END_STREAM))
    assert not connection.send(1, b"0123456789abcdef")
    assert body_of(connection.take(), 1) == b"0123456789"
    assert not connection.send(1, b"ghij")
    connection.finish(1, TRAILERS)
    assert connection.take() == b""
    assert connection.receive(window_update(1, 8)) == []
    assert body_of(connection.take(), 1) == b"abcdefgh"
    connection.receive(window_update(1, 100))
    data = connection.take()
    assert body_of(data, 1) == b"ij"
    assert parse_frames(data)[-1] == (HEADERS, END_HEADERS | END_STREAM, 1, TRAILERS)
    assert connection.num_open == 0


def test_sent_data_counts_towards_the_window() -> None:
    connection = connected(window=10)
    connection.receive(request_headers(1))
    assert connection.send(1, b"012345")
    assert not connection.send(1, b"6789ab")
    assert body_of(connection.take(), 1) == b"0123456789"


def test_a_waiting_writer_is_notified_once_its_data_is_sent() -> None:
    connection = connected(window=4)
    connection.receive(request_headers(1) + request_headers(3))
    assert not connection.send(1, b"abcdef")
    assert connection.send(3, b"abcd"), "another stream's window is its own"
    assert connection.receive(window_update(1, 2)) == [StreamWritable(1)]
    assert not connection.send(1, b"g")
    larger = first_window(5)
    assert connection.receive(larger) == [StreamWritable(1)], "a new size of all windows counts for those that are open"


def test_larger_windows_are_acknowledged_before_they_are_used() -> None:
    """Until then the peer counts by the old windows and treats data beyond them as an error."""
    connection = connected(window=4)
    connection.receive(request_headers(1))
    connection.send(1, b"abcdef")
    connection.take()
    connection.receive(first_window(100))
    assert parse_frames(connection.take()) == [(SETTINGS, ACK, 0, b""), (DATA, 0, 1, b"ef")]


def test_the_window_of_the_connection_goes_to_the_longest_waiting_stream() -> None:
    connection = connected(window=1 << 20)
    connection.receive(b"".join(request_headers(stream) for stream in (1, 3, 5)))
    assert not connection.send(1, b"x" * 65_536), "one byte more than the window"
    assert not connection.send(3, b"y" * 10)
    assert not connection.send(5, b"z" * 10)
    connection.take()
    assert connection.receive(window_update(0, 16)) == [StreamWritable(1), StreamWritable(3)]
    assert connection.receive(window_update(0, 100)) == [StreamWritable(5)]
    data = connection.take()
    assert (body_of(data, 1), body_of(data, 3), body_of(data, 5)) == (b"x", b"y" * 10, b"z" * 10)


def test_large_headers_are_split_into_frames_too() -> None:
    connection = connected()
    connection.receive(request_headers(1))
    connection.send_headers(1, b"h" * 16_384)
    connection.finish(1, b"t" * 40_000)
    frames = parse_frames(connection.take())
    assert [(kind, flags) for kind, flags, *_ in frames[:-1]] == [
        (HEADERS, END_HEADERS),
        (HEADERS, END_STREAM),
        (CONTINUATION, 0),
        (CONTINUATION, END_HEADERS),
    ]
    assert b"".join(payload for *_, payload in frames[1:-1]) == b"t" * 40_000


def test_large_bodies_are_sent_in_frames_of_the_minimum_size() -> None:
    connection = connected(window=1 << 20)
    connection.receive(request_headers(1) + window_update(0, 1 << 20))
    assert connection.send(1, bytes(40_000))
    assert [len(payload) for *_, payload in parse_frames(connection.take())] == [16_384, 16_384, 7_232]


def test_read_bytes_are_returned_to_the_windows() -> None:
    connection = connected()
    connection.receive(request_headers(1))
    given = {0: 16 << 20, 1: 1 << 20}
    for _ in range(3_000):
        connection.receive(frame(DATA, 0, 1, bytes(16_384)))
        for stream in given:
            given[stream] -= 16_384
        for kind, _, stream, payload in parse_frames(connection.take()):
            assert kind == WINDOW_UPDATE
            given[stream] += int.from_bytes(payload, "big")
        assert min(given.values()) > 16_384


def test_a_reset_ends_one_stream_alone() -> None:
    connection = connected()
    connection.receive(request_headers(1) + request_headers(3))
    assert connection.receive(frame(RST_STREAM, 0, 1, struct.pack(">I", 8))) == [StreamReset(1)]
    assert connection.send(1, b"nobody reads this")
    connection.finish(1, TRAILERS)
    assert connection.take() == b""
    assert connection.send(3, b"x")
    assert connection.num_open == 1


def test_a_stream_may_be_reset_before_its_waiting_data() -> None:
    connection = connected(window=4)
    connection.receive(request_headers(1, END_STREAM))
    connection.send(1, b"abcdef")
    connection.end(1, TRAILERS)
    frames = [(DATA, 0, 1, b"abcd"), (HEADERS, END_HEADERS | END_STREAM, 1, TRAILERS)]
    assert parse_frames(connection.take()) == frames
    assert connection.receive(window_update(1, 100)) == []
    connection.end(1, TRAILERS)
    assert connection.take() == b""


def test_a_stream_error_does_not_affect_other_streams() -> None:
    connection = connected()
    connection.receive(request_headers(1, END_STREAM) + request_headers(3))
    assert connection.receive(frame(DATA, 0, 1, b"more")) == [StreamReset(1)]
    assert connection.receive(window_update(3, 0)) == [StreamReset(3)]
    assert [(kind, stream) for kind, _, stream, _ in parse_frames(connection.take())] == [
        (RST_STREAM, 1),
        (RST_STREAM, 3),
    ]
    assert connection.receive(request_headers(5)) == [RequestReceived(5, REQUEST, False)]


def test_too_large_headers_are_answered_and_affect_no_other_stream() -> None:
    connection = connected()
    large = write_headers([("x", "y" * 9000)])
    assert connection.receive(frame(HEADERS, END_HEADERS, 1, large)) == [RequestReceived(1, None, False)]
    assert connection.receive(request_headers(3)) == [RequestReceived(3, REQUEST, False)]


def test_a_closing_connection_takes_no_new_streams_and_ends_open_ones() -> None:
    connection = connected()
    connection.receive(request_headers(1))
    connection.leave()
    assert connection.receive(request_headers(3)) == []
    assert connection.send(1, b"x")
    frames = parse_frames(connection.take())
    assert [kind for kind, *_ in frames] == [GOAWAY, RST_STREAM, DATA]
    assert frames[0][3] == struct.pack(">II", 1, 0), "nothing behind stream 1 was looked at"
    assert frames[1][2:] == (3, struct.pack(">I", 7)), "so it may be tried elsewhere"


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (frame(DATA, 0, 1, b"x"), PROTOCOL_ERROR),
        (frame(HEADERS, END_HEADERS, 2, BLOCK), PROTOCOL_ERROR),
        (frame(PUSH_PROMISE, 0, 1, b"\0\0\0\x02"), PROTOCOL_ERROR),
        (frame(CONTINUATION, END_HEADERS, 1, BLOCK), PROTOCOL_ERROR),
        (frame(HEADERS, 0, 1, BLOCK) + frame(PING, 0, 0, bytes(8)), PROTOCOL_ERROR),
        (frame(HEADERS, END_HEADERS | PADDED, 1, b"\x09abc"), PROTOCOL_ERROR),
        (frame(HEADERS, END_HEADERS, 1, b"\x80"), 9),
        (frame(HEADERS, 0, 1, BLOCK) + frame(CONTINUATION, 0, 1), ENHANCE_YOUR_CALM),
        (frame(HEADERS, 0, 1) + frame(CONTINUATION, 0, 1, bytes(16_384)) * 3, ENHANCE_YOUR_CALM),
        (frame(PING, 0, 0, b"short"), 6),
        (frame(SETTINGS, 0, 0, b"abc"), 6),
        (first_window(1 << 31), FLOW_CONTROL_ERROR),
        (window_update(0, 0), PROTOCOL_ERROR),
        (window_update(0, (1 << 31) - 1), FLOW_CONTROL_ERROR),
        (frame(RST_STREAM, 0, 7, bytes(4)), PROTOCOL_ERROR),
        (b"\x00\x40\x01" + frame(DATA, 0, 1)[3:], 6),
    ],
)
def test_a_connection_error_ends_the_connection(data: bytes, code: int) -> None:
    assert fault_of(connected(), data) == code


def test_a_peer_that_sends_no_preface_is_no_client() -> None:
    assert fault_of(ServerConnection(8192), b"GET / HTTP/1.1\r\n") == PROTOCOL_ERROR
    assert fault_of(ServerConnection(8192), PREFACE + frame(PING, 0, 0, bytes(8))) == PROTOCOL_ERROR


def test_a_peer_that_only_sends_pings_and_settings_is_disconnected() -> None:
    connection = connected()
    for _ in range(10):
        connection.receive(frame(PING, 0, 0, bytes(8)) * 100)
        connection.take()
    assert fault_of(connection, frame(PING, 0, 0, bytes(8))) == ENHANCE_YOUR_CALM


def test_data_sent_and_time_replenish_the_flood_budget() -> None:
    """A client that measures its bandwidth sends pings, one with small windows sends updates, all the time."""
    connection = connected()
    connection.receive(request_headers(1))
    for _ in range(10_000):
        connection.send(1, b"a token")
        connection.receive(window_update(1, 7) + window_update(0, 7) + frame(PING, 0, 0, bytes(8)))
        connection.take()
    for _ in range(10):
        connection.receive(frame(PING, 0, 0, bytes(8)) * 1_000)
        connection.take()
        connection.guard.forgive()


def test_a_peer_that_only_sends_window_updates_is_disconnected() -> None:
    connection = connected()
    connection.receive(request_headers(1))
    assert fault_of(connection, (window_update(0, 1) + window_update(1, 1)) * 501) == ENHANCE_YOUR_CALM


def test_a_peer_that_only_causes_refused_streams_is_disconnected() -> None:
    connection = connected()
    for stream in range(1, 2_001, 2):
        connection.receive(request_headers(stream, END_STREAM))
        connection.refuse(stream, TRAILERS)
        connection.take()
    connection.receive(request_headers(2_001, END_STREAM))
    with pytest.raises(ConnectionFault) as caught:
        connection.refuse(2_001, TRAILERS)
    assert caught.value.code == ENHANCE_YOUR_CALM
    assert parse_frames(connection.take())[-1][0] == GOAWAY


def test_a_peer_that_sends_a_request_byte_by_byte_is_disconnected() -> None:
    connection = connected()
    connection.receive(request_headers(1))
    connection.receive(frame(DATA, 0, 1, b"x") * 1_000)
    assert fault_of(connection, frame(DATA, 0, 1, b"x")) == ENHANCE_YOUR_CALM


def test_frames_for_ended_streams_are_charged_too() -> None:
    connection = connected()
    connection.receive(request_headers(1))
    connection.finish(1, TRAILERS)
    connection.take()
    assert fault_of(connection, frame(DATA, 0, 1, bytes(64)) * 1_001) == ENHANCE_YOUR_CALM


def test_more_streams_are_allowed_later() -> None:
    connection = ServerConnection(8192, max_streams=2)
    (settings, _) = parse_frames(connection.take())
    assert settings[3][:6] == struct.pack(">HI", 3, 2)
    connection.receive(PREFACE + frame(SETTINGS, 0, 0))
    assert [type(one) for one in connection.receive(request_headers(1) + request_headers(3) + request_headers(5))] == [
        RequestReceived,
        RequestReceived,
    ]
    connection.take()
    connection.allow_streams(3)
    connection.allow_streams(3)
    assert parse_frames(connection.take()) == [(SETTINGS, 0, 0, struct.pack(">HI", 3, 3))]
    assert connection.receive(request_headers(7)) == [RequestReceived(7, REQUEST, False)]


def test_a_peer_that_opens_streams_only_to_reset_them_is_disconnected() -> None:
    connection = connected()
    pairs = [request_headers(s, END_STREAM) + frame(RST_STREAM, 0, s, bytes(4)) for s in range(1, 6_001, 2)]
    assert fault_of(connection, b"".join(pairs)) == ENHANCE_YOUR_CALM


def test_a_peer_that_reads_answers_may_reset_many_streams() -> None:
    connection = connected()
    for stream in range(1, 12_001, 2):
        connection.receive(request_headers(stream, END_STREAM))
        if stream % 3:
            connection.receive(frame(RST_STREAM, 0, stream, bytes(4)))
        else:
            connection.finish(stream, TRAILERS)
        connection.take()
    assert connection.num_open == 0


CONVERSATION = (
    PREFACE
    + frame(SETTINGS, 0, 0, struct.pack(">HIHI", 4, 70_000, 5, 16_384))
    + request_headers(1)
    + frame(DATA, PADDED, 1, b"\x02abc\0\0")
    + frame(HEADERS, 0, 3, BLOCK[:4])
    + frame(CONTINUATION, END_HEADERS, 3, BLOCK[4:])
    + frame(PING, 0, 0, bytes(8))
    + window_update(0, 5_000)
    + frame(RST_STREAM, 0, 3, bytes(4))
    + frame(0xEE, 0xFF, 5, b"of a later version")
    + frame(DATA, END_STREAM, 1, b"def")
)


@given(st.lists(st.integers(0, len(CONVERSATION)), max_size=6))
def test_the_result_does_not_depend_on_how_bytes_are_split(cuts: Sequence[int]) -> None:
    whole, cut = ServerConnection(8192), ServerConnection(8192)
    events: list[Event] = []
    places = [0, *sorted(cuts), len(CONVERSATION)]
    for start, stop in pairwise(places):
        events += cut.receive(CONVERSATION[start:stop])
    assert events == list(whole.receive(CONVERSATION))
    assert cut.take() == whole.take()


FRAMES = st.builds(
    frame, st.integers(0, 11), st.integers(0, 255), st.integers(0, 9), st.one_of(st.binary(max_size=40), st.just(BLOCK))
)


@given(st.lists(FRAMES, max_size=12), st.data())
def test_any_bytes_of_a_peer_are_at_most_a_protocol_error(frames: list[bytes], data: st.DataObject) -> None:
    connection = connected()
    open_streams: set[int] = set()
    for one in frames:
        try:
            events = connection.receive(one)
        except ConnectionFault:
            break
        for event in events:
            if isinstance(event, RequestReceived):
                open_streams.add(event.stream)
            elif isinstance(event, StreamReset):
                open_streams.discard(event.stream)
        for stream in sorted(open_streams):
            if data.draw(st.booleans()):
                connection.send(stream, b"some")
            if data.draw(st.booleans()):
                connection.finish(stream, TRAILERS)
                open_streams.discard(stream)
    parse_frames(connection.take())


@pytest.mark.parametrize(
    "useless",
    [
        frame(DATA, 0, 1),
        frame(DATA, PADDED, 1, b"\x03\0\0\0"),
        frame(PRIORITY, 0, 3, bytes(5)),
        frame(0xEE, 0, 0),
        frame(PING, ACK, 0, bytes(8)),
        frame(GOAWAY, 0, 0, bytes(8)),
        first_window(1),
    ],
    ids=["empty", "padding", "priority", "unknown", "answers", "farewells", "settings"],
)
def test_a_peer_that_sends_only_useless_frames_is_disconnected(useless: bytes) -> None:
    connection = connected()
    connection.receive(request_headers(1))
    for _ in range(5):
        connection.receive(useless * 900)
        connection.take()
        connection.guard.forgive()
    assert fault_of(connection, useless * 1_001) == ENHANCE_YOUR_CALM


def test_changing_the_initial_window_is_charged_by_the_number_of_streams() -> None:
    connection = connected()
    connection.receive(b"".join(request_headers(stream) for stream in range(1, 20_001, 2)))
    one_frame = frame(SETTINGS, 0, 0, b"".join(struct.pack(">HI", 4, size) for size in range(2_000)))
    connection.receive(one_frame)
    connection.take()
    smaller, larger = (first_window(size) for size in (1, 2))
    assert fault_of(connection, (smaller + larger) * 10) == ENHANCE_YOUR_CALM


def test_a_peer_that_makes_the_server_reset_its_streams_is_disconnected() -> None:
    """CVE-2025-8671: a deliberate stream error costs as much as a reset."""
    connection = connected()
    pairs = [request_headers(stream, END_STREAM) + window_update(stream, 0) for stream in range(1, 4_003, 2)]
    for pair in pairs[:-1]:
        connection.receive(pair)
        connection.take()
        connection.guard.forgive()
    assert fault_of(connection, pairs[-1]) == ENHANCE_YOUR_CALM


@pytest.mark.parametrize("value", [" v", "v ", "\tv", "v\t", "a\0b", "a\nb", "\r"])
@pytest.mark.parametrize("name", ["x", ":path"])
def test_a_header_value_with_outer_blanks_or_controls_is_a_stream_error(name: str, value: str) -> None:
    """RFC 9113, 8.2.1."""
    fields = [*(one for one in REQUEST if one[0] != name), (name, value)]
    fields.sort(key=lambda one: not one[0].startswith(":"))
    connection = connected()
    assert connection.receive(frame(HEADERS, END_HEADERS, 1, write_headers(fields))) == [StreamReset(1)]
    assert parse_frames(connection.take()) == [(RST_STREAM, 0, 1, struct.pack(">I", PROTOCOL_ERROR))]


def test_unread_answers_count_as_open_streams() -> None:
    connection = connected()
    for stream in range(1, 20_001, 2):
        connection.receive(request_headers(stream, END_STREAM))
        connection.finish(stream, TRAILERS)
    assert connection.receive(request_headers(20_001)) == [], "refused"
    connection.take()
    assert connection.receive(request_headers(20_003)) == [RequestReceived(20_003, REQUEST, False)]


def test_frames_for_a_stream_that_was_reset_are_ignored() -> None:
    """The peer could not know yet of an early answer, a refusal or an error."""
    connection = connected()
    connection.receive(request_headers(1) + request_headers(3) + request_headers(5))
    connection.finish(1, TRAILERS)
    connection.end(3, TRAILERS)
    connection.receive(window_update(5, 0))
    connection.leave()
    connection.receive(request_headers(7))
    late = [frame(DATA, 0, s, b"x") + window_update(s, 1) + frame(HEADERS, 5, s, TRAILERS) for s in (1, 3, 5, 7)]
    assert connection.receive(b"".join(late)) == []


def test_frames_for_a_stream_that_was_reset_long_ago_are_ignored() -> None:
    connection = connected()
    for stream in range(1, 4_001, 2):
        connection.receive(request_headers(stream))
        connection.finish(stream, TRAILERS)
    assert connection.receive(frame(DATA, 0, 1, b"x") + frame(DATA, 0, 3_999, b"x")) == []


def test_a_peer_that_sends_on_a_stream_it_ended_is_disconnected() -> None:
    connection = connected()
    connection.receive(request_headers(1, END_STREAM))
    connection.finish(1, TRAILERS)
    assert fault_of(connection, frame(DATA, 0, 1, b"x")) == STREAM_CLOSED


@pytest.mark.parametrize("length", ["", "-1", "1e3", "1" * 19])
def test_an_invalid_content_length_is_a_stream_error(length: str) -> None:
    connection = connected()
    block = write_headers([*REQUEST, ("content-length", length)])
    assert connection.receive(frame(HEADERS, END_HEADERS, 1, block)) == [StreamReset(1)]


def test_a_body_must_have_its_announced_length() -> None:
    connection = connected()
    for stream, data in ((1, b"abc"), (3, b"ab"), (5, b"abcd")):
        block = write_headers([*REQUEST, ("content-length", "3")])
        connection.receive(frame(HEADERS, END_HEADERS, stream, block))
        (event,) = connection.receive(frame(DATA, END_STREAM, stream, data))
        assert isinstance(event, DataReceived) == (stream == 1)
    twice = write_headers([*REQUEST, ("content-length", "3"), ("content-length", "4")])
    assert connection.receive(frame(HEADERS, END_HEADERS, 7, twice)) == [StreamReset(7)]
