"""The client end of HTTP/2: which frames a server may send, and how each call ends once."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.wire.http2.client import Http2Client
from baton.wire.http2.client_connection import CallEnd, ClientConnection, call_headers
from baton.wire.http2.frames import (
    COMPRESSION_ERROR,
    ENHANCE_YOUR_CALM,
    FLOW_CONTROL_ERROR,
    FRAME_SIZE_ERROR,
    PREFACE,
    PROTOCOL_ERROR,
    ConnectionFault,
)
from baton.wire.http2.header_blocks import Header, write_headers
from baton.wire.http2.server_connection import DataReceived, RequestReceived, ServerConnection
from tests.support.http2_frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PADDED,
    PING,
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

ASK = call_headers("/baton.v1.Node/Attach", "here:1")
BEGIN = write_headers([(":status", "200"), ("content-type", "application/grpc")])
OK = write_headers([("grpc-status", "0")])
MAX_BYTES = 1000
INTERNAL, UNAVAILABLE = grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE


class ReceivedCall:
    """Everything that one call received."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.ended: CallEnd | None = None

    def on_messages(self, messages: Sequence[bytes]) -> None:
        assert self.ended is None
        self.messages += messages

    def on_end(self, ended: CallEnd) -> None:
        assert self.ended is None, "it ended twice"
        self.ended = ended

    @property
    def code(self) -> grpc.StatusCode:
        assert self.ended is not None, "it has not ended"
        return self.ended.code


def packed(*messages: bytes) -> bytes:
    return b"".join(struct.pack(">BI", 0, len(message)) + message for message in messages)


def headers(stream: int, block: bytes, flags: int = 0) -> bytes:
    return frame(HEADERS, END_HEADERS | flags, stream, block)


def connected(window: int | None = None) -> ClientConnection:
    """Return a connection after the exchange of settings."""
    connection = ClientConnection(MAX_BYTES)
    connection.receive(frame(SETTINGS, 0, 0) if window is None else first_window(window))
    connection.take()
    return connection


def started_call(connection: ClientConnection, *messages: bytes) -> tuple[int, ReceivedCall]:
    """Start a call with these messages that may send more; its answer has begun."""
    received = ReceivedCall()
    stream = connection.begin(ASK, received)
    for message in messages:
        connection.send(stream, message)
    connection.receive(headers(stream, BEGIN))
    connection.take()
    return stream, received


def test_a_call_is_sent_and_its_answer_received() -> None:
    connection = ClientConnection(MAX_BYTES)
    greeting = connection.take()
    assert greeting.startswith(PREFACE)
    assert [kind for kind, *_ in parse_frames(greeting[len(PREFACE) :])] == [SETTINGS, WINDOW_UPDATE]
    connection.receive(frame(SETTINGS, 0, 0) + frame(PING, 0, 0, b"12345678"))
    assert parse_frames(connection.take()) == [(SETTINGS, ACK, 0, b""), (PING, ACK, 0, b"12345678")]
    received = ReceivedCall()
    stream = connection.begin(ASK, received)
    connection.send(stream, b"one", is_last=True)
    assert parse_frames(connection.take()) == [(HEADERS, END_HEADERS, 1, ASK), (DATA, END_STREAM, 1, packed(b"one"))]
    trailers = [("grpc-status", "0"), ("where", "there")]
    connection.receive(headers(1, BEGIN) + frame(DATA, 0, 1, packed(b"a", b"bc")))
    assert received.messages == [b"a", b"bc"]
    connection.receive(headers(1, write_headers(trailers), END_STREAM))
    assert received.ended == CallEnd(grpc.StatusCode.OK, "", trailers)
    assert (connection.num_open, connection.take()) == (0, b"")


def test_a_call_that_is_answered_early_stops_sending() -> None:
    connection = connected()
    stream, received = started_call(connection, b"one")
    connection.receive(headers(stream, OK, END_STREAM))
    assert received.code is grpc.StatusCode.OK
    assert [(kind, number) for kind, _, number, _ in parse_frames(connection.take())] == [(RST_STREAM, stream)]
    connection.send(stream, b"more")
    connection.cancel(stream)
    assert connection.take() == b""


def test_messages_are_joined_however_they_are_split() -> None:
    connection = connected()
    stream, received = started_call(connection)
    body = packed(b"", b"x" * 500, b"yz")
    for at in range(len(body)):
        connection.receive(frame(DATA, PADDED, stream, b"\x02" + body[at : at + 1] + b"\0\0"))
    assert received.messages == [b"", b"x" * 500, b"yz"]


def test_data_beyond_the_window_waits_in_order() -> None:
    connection = connected(window=10)
    stream, _ = started_call(connection)
    connection.send(stream, b"a" * 20)
    connection.send(stream, b"b", is_last=True)
    whole = packed(b"a" * 20, b"b")
    first = connection.take()
    assert body_of(first, stream) == whole[:10]
    connection.receive(window_update(stream, 12))
    second = connection.take()
    assert body_of(second, stream) == whole[10:22]
    connection.receive(first_window(1000))
    acknowledged, *rest = parse_frames(connection.take())
    assert acknowledged == (SETTINGS, ACK, 0, b"")
    assert rest == [(DATA, END_STREAM, stream, whole[22:])]


def test_all_calls_share_the_window_of_the_connection() -> None:
    connection = connected(window=1 << 20)
    stream, _ = started_call(connection)
    other, _ = started_call(connection)
    connection.send(stream, b"a" * 65_000)
    connection.send(other, b"b" * 2_000)
    out = connection.take()
    assert len(body_of(out, stream)) + len(body_of(out, other)) == 65_535
    assert max(len(payload) for _, _, _, payload in parse_frames(out)) == 16_384
    connection.receive(window_update(0, 5_000))
    assert body_of(out, other) + body_of(connection.take(), other) == packed(b"b" * 2_000)


def test_read_bytes_are_returned_to_the_windows() -> None:
    connection = connected()
    stream, received = started_call(connection)
    for _ in range(2000):
        connection.receive(frame(DATA, 0, stream, packed(b"x" * 995)) * 10)
    assert len(received.messages) == 20_000
    given = [(number, int.from_bytes(payload, "big")) for kind, _, number, payload in parse_frames(connection.take())]
    for number in (0, stream):
        assert sum(more for one, more in given if one == number) > 8 << 20


@pytest.mark.parametrize(
    ("status", "code"),
    [
        ("401", grpc.StatusCode.UNAUTHENTICATED),
        ("404", grpc.StatusCode.UNIMPLEMENTED),
        ("503", UNAVAILABLE),
        ("500", grpc.StatusCode.UNKNOWN),
    ],
)
def test_an_answer_that_is_not_grpc_is_an_error(status: str, code: grpc.StatusCode) -> None:
    connection = connected()
    received = ReceivedCall()
    stream = connection.begin(ASK, received)
    connection.receive(headers(stream, write_headers([(":status", status), ("content-type", "text/html")])))
    assert received.code is code
    assert received.ended is not None
    assert status in received.ended.detail


@pytest.mark.parametrize(
    ("last", "code", "story"),
    [
        ([("grpc-status", "5"), ("grpc-message", "no%20such%20thing")], grpc.StatusCode.NOT_FOUND, "no such thing"),
        ([("grpc-status", "99")], grpc.StatusCode.UNKNOWN, "99"),
        ([("grpc-status", "x")], grpc.StatusCode.UNKNOWN, "x"),
        ([], grpc.StatusCode.UNKNOWN, "missing"),
    ],
)
def test_an_error_has_the_message_of_the_server(last: list[Header], code: grpc.StatusCode, story: str) -> None:
    for begin in ([(":status", "200"), ("content-type", "application/grpc")], []):
        connection = connected()
        stream, received = started_call(connection)
        if begin:  # nothing but headers
            received = ReceivedCall()
            stream = connection.begin(ASK, received)
        connection.receive(headers(stream, write_headers([*begin, *last]), END_STREAM))
        assert received.code is code
        assert received.ended is not None
        assert story in received.ended.detail


def test_a_body_without_headers_is_a_protocol_error() -> None:
    connection = connected()
    received = ReceivedCall()
    connection.receive(frame(DATA, 0, connection.begin(ASK, received), packed(b"x")))
    assert (received.messages, received.code) == ([], INTERNAL)


def test_informational_headers_do_not_begin_an_answer() -> None:
    connection = connected()
    received = ReceivedCall()
    stream = connection.begin(ASK, received)
    connection.receive(headers(stream, write_headers([(":status", "103")])) + headers(stream, BEGIN))
    connection.receive(frame(DATA, 0, stream, packed(b"x")) + headers(stream, OK, END_STREAM))
    assert (received.messages, received.code) == ([b"x"], grpc.StatusCode.OK)


LARGE = write_headers([(f"k{number}", "v" * 1000) for number in range(100)])
BROKEN_CALLS = [
    (frame(RST_STREAM, 0, 1, struct.pack(">I", 7)), UNAVAILABLE, False),
    (frame(RST_STREAM, 0, 1, struct.pack(">I", 8)), grpc.StatusCode.CANCELLED, False),
    (frame(RST_STREAM, 0, 1, struct.pack(">I", 2)), INTERNAL, False),
    (frame(DATA, END_STREAM, 1, packed(b"x")), INTERNAL, False),
    (frame(DATA, 0, 1, struct.pack(">BI", 0, MAX_BYTES + 1)), grpc.StatusCode.RESOURCE_EXHAUSTED, True),
    (frame(DATA, 0, 1, struct.pack(">BI", 1, 3) + b"abc"), INTERNAL, True),
    (headers(1, BEGIN), INTERNAL, True),
    (window_update(1, 0), INTERNAL, True),
    (window_update(1, (1 << 31) - 1), INTERNAL, True),
    (
        frame(HEADERS, 0, 1, LARGE[:16_000])
        + b"".join(frame(CONTINUATION, 0, 1, LARGE[at : at + 16_000]) for at in range(16_000, 96_000, 16_000))
        + frame(CONTINUATION, END_HEADERS, 1, LARGE[96_000:]),
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        True,
    ),
]


@pytest.mark.parametrize(("said", "code", "is_reset"), BROKEN_CALLS)
def test_an_error_in_one_call_does_not_affect_others(said: bytes, code: grpc.StatusCode, *, is_reset: bool) -> None:
    connection = connected()
    stream, received = started_call(connection)
    other, well = started_call(connection)
    assert stream == 1
    connection.receive(said)
    assert received.code is code
    told = [kind for kind, _, number, _ in parse_frames(connection.take()) if number == stream]
    assert told == ([RST_STREAM] if is_reset else [])
    # What was still under way counts for nothing.
    connection.receive(
        frame(DATA, 0, stream, packed(b"late")) + headers(stream, OK, END_STREAM) + window_update(stream, 1)
    )
    connection.receive(frame(DATA, 0, other, packed(b"x")) + headers(other, OK, END_STREAM))
    assert (well.messages, well.code) == ([b"x"], grpc.StatusCode.OK)


@pytest.mark.parametrize(
    ("said", "code"),
    [
        (frame(DATA, 0, 5, b""), PROTOCOL_ERROR),
        (frame(DATA, 0, 2, b""), PROTOCOL_ERROR),
        (frame(DATA, PADDED, 1, b"\x05abc"), PROTOCOL_ERROR),
        (headers(7, BEGIN), PROTOCOL_ERROR),
        (headers(1, b"\xff\xff\xff\xff\xff\xff"), COMPRESSION_ERROR),
        (frame(HEADERS, 0, 1, b"") + frame(PING, 0, 0, bytes(8)), PROTOCOL_ERROR),
        (frame(HEADERS, 0, 1, b"") + frame(CONTINUATION, 0, 1, b""), ENHANCE_YOUR_CALM),
        (frame(HEADERS, 0, 1, b"") + frame(CONTINUATION, 0, 1, bytes(16_000)) * 10, ENHANCE_YOUR_CALM),
        (frame(CONTINUATION, 0, 1, b""), PROTOCOL_ERROR),
        (frame(PUSH_PROMISE, END_HEADERS, 1, bytes(4)), PROTOCOL_ERROR),
        (frame(SETTINGS, 0, 1), PROTOCOL_ERROR),
        (frame(SETTINGS, 0, 0, b"abc"), FRAME_SIZE_ERROR),
        (first_window(1 << 31), FLOW_CONTROL_ERROR),
        (window_update(1, 1 << 30) + first_window((1 << 31) - 1), FLOW_CONTROL_ERROR),
        (frame(PING, 0, 1, bytes(8)), PROTOCOL_ERROR),
        (frame(PING, 0, 0, b"abc"), FRAME_SIZE_ERROR),
        (frame(PING, 0, 0, bytes(8)) * 1500, ENHANCE_YOUR_CALM),
        (frame(GOAWAY, 0, 0, bytes(4)), FRAME_SIZE_ERROR),
        (frame(RST_STREAM, 0, 1, bytes(3)), FRAME_SIZE_ERROR),
        (window_update(0, 0), PROTOCOL_ERROR),
        (window_update(0, (1 << 31) - 1), FLOW_CONTROL_ERROR),
        (struct.pack(">I", 20_000)[1:] + bytes(6), FRAME_SIZE_ERROR),
    ],
)
def test_a_connection_error_ends_each_call_once(said: bytes, code: int) -> None:
    connection = connected()
    calls = [started_call(connection)[1], started_call(connection)[1]]
    with pytest.raises(ConnectionFault) as caught:
        connection.receive(said)
    assert caught.value.code == code
    *_, (kind, _, _, payload) = parse_frames(connection.take())
    assert (kind, int.from_bytes(payload[4:8], "big")) == (GOAWAY, code)
    assert [received.code for received in calls] == [UNAVAILABLE, UNAVAILABLE]
    connection.end_calls("and it is gone")


def test_a_peer_that_sends_no_settings_is_no_server() -> None:
    connection = ClientConnection(MAX_BYTES)
    with pytest.raises(ConnectionFault):
        connection.receive(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def test_a_server_that_sends_goaway_answers_the_calls_it_accepted() -> None:
    connection = connected()
    first, answered = started_call(connection)
    _, refused = started_call(connection)
    connection.receive(frame(GOAWAY, 0, 0, struct.pack(">II", first, 0) + b"bye"))
    assert connection.is_leaving
    assert refused.code is UNAVAILABLE
    connection.receive(headers(first, OK, END_STREAM))
    assert answered.code is grpc.StatusCode.OK


def test_a_lost_connection_ends_every_call_once() -> None:
    connection = connected()
    calls = [started_call(connection)[1] for _ in range(3)]
    connection.end_calls("the wire is cut")
    connection.end_calls("again")
    assert [received.ended for received in calls] == [CallEnd(UNAVAILABLE, "the wire is cut")] * 3


def test_a_cancelled_call_receives_nothing_more() -> None:
    connection = connected()
    stream, received = started_call(connection)
    connection.cancel(stream)
    assert parse_frames(connection.take()) == [(RST_STREAM, 0, stream, struct.pack(">I", 8))]
    connection.receive(frame(DATA, 0, stream, packed(b"x")) + headers(stream, OK, END_STREAM))
    connection.end_calls("gone")
    assert (received.messages, received.ended) == ([], None)


@dataclass
class Peer:
    """The server end of a socket, driven by the test."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


@asynccontextmanager
async def sockets() -> AsyncIterator[tuple[Http2Client, Peer]]:
    """Yield a client and its peer."""
    came: asyncio.Future[Peer] = asyncio.get_running_loop().create_future()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.set_result(Peer(reader, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        client = await Http2Client.open(*server.sockets[0].getsockname()[:2])
        peer = await came
        try:
            yield client, peer
        finally:
            client.close()
            peer.writer.close()


async def test_pending_data_is_sent_before_the_connection_closes() -> None:
    async with sockets() as (client, peer):
        call = client.call(ASK, ReceivedCall())
        client.send(call, b"the last word")
        client.cancel(call)
        client.close()
        said = parse_frames((await peer.reader.read())[len(PREFACE) :])
        assert [kind for kind, *_ in said[2:]] == [HEADERS, DATA, RST_STREAM]
        assert said[3][-1] == packed(b"the last word")


class Persistent(ReceivedCall):
    """Starts another call as soon as one fails."""

    def __init__(self, client: Http2Client) -> None:
        super().__init__()
        self._client = client
        self.again = ReceivedCall()

    def on_end(self, ended: CallEnd) -> None:
        super().on_end(ended)
        self._client.call(ASK, self.again)


async def test_a_call_started_while_the_connection_is_being_lost_fails_too() -> None:
    async with sockets() as (client, peer):
        caller, late = Persistent(client), ReceivedCall()
        client.call(ASK, caller)
        peer.writer.transport.abort()
        await client.closed
        client.send(client.call(ASK, late), b"x")
        assert [caller.code, caller.again.code, late.code] == [UNAVAILABLE] * 3


async def test_the_last_call_of_a_closing_connection_ends_it_even_when_cancelled() -> None:
    async with sockets() as (client, peer):
        call = client.call(ASK, ReceivedCall())
        peer.writer.write(frame(SETTINGS, 0, 0) + frame(GOAWAY, 0, 0, struct.pack(">II", call, 0)))
        await client.closed
        client.cancel(call)
        *_, (kind, _, number, _) = parse_frames((await peer.reader.read())[len(PREFACE) :])
        assert (kind, number) == (RST_STREAM, call)


async def test_data_that_the_kernel_does_not_take_at_once_is_sent_later() -> None:
    async with sockets() as (client, peer):
        call, said = client.call(ASK, ReceivedCall()), b""
        windows = first_window(1 << 26) + window_update(0, 1 << 26)
        peer.writer.write(windows + frame(PING, 0, 0, b"are read"))
        while b"are read" not in said:
            said += await peer.reader.read(1 << 20)
        message = bytes(range(256)) * (1 << 14)
        for number in range(5):
            client.send(call, message, is_last=number == 4)
            await asyncio.sleep(0)
        num_frames = len(packed(message)) // 16_384 + 1
        said += await peer.reader.readexactly(5 * (len(packed(message)) + 9 * num_frames))
        assert body_of(said[len(PREFACE) :], call) == packed(*[message] * 5)


@given(
    st.lists(st.integers(0, 3000), min_size=1, max_size=8),
    st.lists(st.integers(0, 900), max_size=8),
    st.integers(0, 500),
    st.integers(1, 700),
)
def test_both_ends_understand_each_other(asks: list[int], answers: list[int], window: int, cut: int) -> None:
    """For any sizes, windows and pieces in which bytes arrive."""
    client, server, received = ClientConnection(MAX_BYTES), ServerConnection(8192), ReceivedCall()
    stream = client.begin(ASK, received)
    questions = [bytes([number]) * size for number, size in enumerate(asks)]
    replies = [bytes([number]) * size for number, size in enumerate(answers)]
    for question in questions:
        client.send(stream, question, is_last=question is questions[-1])
    client.receive(first_window(window))
    got, is_ended, is_first = b"", False, True
    while received.ended is None:
        data = client.take()
        back = b"" if is_first else server.take()
        if is_first:
            server.take()  # its greeting: the client has read other ones
            is_first = False
        for at in range(0, len(data), cut):
            for event in server.receive(data[at : at + cut]):
                if isinstance(event, RequestReceived):
                    server.send_headers(stream, BEGIN)
                    for reply in replies:
                        server.send(stream, packed(reply))
                elif isinstance(event, DataReceived):
                    got += event.data
                    is_ended = is_ended or event.is_ended
        if is_ended:
            server.finish(stream, OK)
        else:
            client.receive(window_update(stream, 333))
        for at in range(0, len(back), cut):
            client.receive(back[at : at + cut])
    assert got == packed(*questions)
    assert received.messages == replies
    assert received.code is grpc.StatusCode.OK


CONVERSATION = (
    frame(SETTINGS, 0, 0, struct.pack(">HIHI", 4, 70_000, 5, 16_384))
    + headers(1, BEGIN)
    + frame(DATA, PADDED, 1, b"\x02" + packed(b"abc") + b"\0\0")
    + frame(PING, 0, 0, bytes(8))
    + frame(HEADERS, 0, 3, BEGIN[:4])
    + frame(CONTINUATION, END_HEADERS, 3, BEGIN[4:])
    + frame(0xEE, 0xFF, 5, b"of a later version")
    + window_update(0, 5_000)
    + frame(RST_STREAM, 0, 3, bytes(4))
    + frame(DATA, 0, 1, packed(b"d" * 300)[:100])
    + frame(DATA, 0, 1, packed(b"d" * 300)[100:])
    + headers(1, OK, END_STREAM)
)


@given(st.lists(st.integers(0, len(CONVERSATION)), max_size=6))
def test_the_result_does_not_depend_on_how_bytes_are_split(cuts: Sequence[int]) -> None:
    connection, received = ClientConnection(MAX_BYTES), [ReceivedCall(), ReceivedCall()]
    for one in received:
        connection.begin(ASK, one)
    for start, stop in pairwise([0, *sorted(cuts), len(CONVERSATION)]):
        connection.receive(CONVERSATION[start:stop])
    assert [one.messages for one in received] == [[b"abc", b"d" * 300], []]
    assert [one.code for one in received] == [grpc.StatusCode.OK, INTERNAL]


FRAMES = st.builds(
    frame,
    st.integers(0, 11),
    st.integers(0, 255),
    st.integers(0, 5),
    st.one_of(st.binary(max_size=40), st.sampled_from([BEGIN, OK, packed(b"x"), bytes(4), bytes(8)])),
)


@given(st.lists(FRAMES, max_size=12), st.data())
def test_any_bytes_of_a_peer_are_at_most_a_protocol_error(frames: list[bytes], data: st.DataObject) -> None:
    connection = connected()
    calls = [started_call(connection) for _ in range(2)]
    for one in frames:
        try:
            connection.receive(one)
        except ConnectionFault:
            break
        for stream, _ in calls:
            if data.draw(st.booleans()):
                connection.send(stream, b"some")
    connection.end_calls("it is over")
    assert all(received.ended is not None for _, received in calls)
    parse_frames(connection.take())
