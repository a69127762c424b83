"""What one HTTP connection reads and when: no body before it is requested, and a bounded rest after an early answer."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT

from baton.wire.turn_budget import TurnBudget
from router.http.connection import LINGER_S, MAX_DROPPED_BYTES, READ_BYTES, STEP_BYTES
from tests.doubles.fake_clock import FakeClock
from tests.support.http_transport import Client
from tests.support.virtual_time import run_virtually

HEAD = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
ONE = b"1\r\nx\r\n"
MANY = ONE * (1 << 16)


class App:
    """An application that reads the next piece of a body, or answers, when the test tells it to."""

    def __init__(self) -> None:
        self.scopes: list[Scope] = []
        self.received: asyncio.Queue[Message] = asyncio.Queue()
        self._asks: asyncio.Queue[bool] = asyncio.Queue()

    def ask(self) -> None:
        self._asks.put_nowait(True)

    def answer(self) -> None:
        self._asks.put_nowait(False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scopes.append(scope)
        while await self._asks.get():
            self.received.put_nowait(await receive())
        await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"no"})


async def connected(sent: bytes, *, answers: bool = False) -> tuple[App, Client]:
    """An application, and a client that has sent this; `answers`: the application does so at once."""
    app = App()
    client = Client(app)
    client.send(sent)
    if answers:
        app.answer()
    await client.run_loop()
    return app, client


async def in_pieces(scope: Scope, receive: Receive, send: Send) -> None:
    """An application whose answer has no length."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"ab", "more_body": True})
    await send({"type": "http.response.body", "body": b"c"})


@pytest.mark.parametrize(("version", "body"), [(b"1.1", b"2\r\nab\r\n1\r\nc\r\n0\r\n\r\n"), (b"1.0", b"abc")])
async def test_an_answer_in_pieces_has_chunks_where_clients_know_them(version: bytes, body: bytes) -> None:
    client = Client(in_pieces)
    client.send(b"GET / HTTP/%b\r\nhost: x\r\n\r\n" % version)
    await client.run_loop()
    head, _, rest = client.transport.written.partition(b"\r\n\r\n")
    assert rest == body
    assert (b"chunked" in head, client.transport.is_closed) == (version == b"1.1", version == b"1.0")


async def test_a_body_stays_in_the_kernel_until_it_is_asked_for() -> None:
    app, client = await connected(HEAD + MANY)
    assert len(app.scopes) == 1
    assert client.transport.is_paused
    assert len(client.unsent) >= len(MANY) - READ_BYTES
    app.ask()
    first = await app.received.get()
    # What was in one piece with the head, and what one turn brought.
    assert len(first["body"]) <= (STEP_BYTES + READ_BYTES) // len(ONE)
    while (await _next(app))["more_body"] and client.unsent:
        pass
    assert not client.unsent


async def _next(app: App) -> Message:
    app.ask()
    return await app.received.get()


async def test_connections_share_the_budget_of_a_turn() -> None:
    clock, app = FakeClock(), App()

    def a_millisecond_a_look() -> float:
        clock.advance(0.001)
        return clock.monotonic()

    budget = TurnBudget(asyncio.get_running_loop(), 0.0035, a_millisecond_a_look)
    clients = [Client(app, budget) for _ in range(40)]
    for client in clients:
        client.send(HEAD)
    begun = []
    while len(app.scopes) < 40:
        before = len(app.scopes)
        await asyncio.sleep(0)
        begun.append(len(app.scopes) - before)
    assert max(begun) <= 4


async def test_a_request_answered_early_is_not_read_further() -> None:
    app, client = await connected(HEAD + MANY, answers=True)
    assert client.transport.written.startswith(b"HTTP/1.1 401 ")
    assert client.transport.has_ended
    # Dropped, not parsed; and not for ever.
    while not client.transport.is_closed:
        await client.run_loop()
    assert len(client.unsent) >= len(MANY) - MAX_DROPPED_BYTES - 3 * READ_BYTES
    assert app.received.empty()


async def test_reading_resumes_when_a_connection_closes_with_an_unread_body() -> None:
    """Over TLS a connection with paused reading would never close (`close_transport`)."""
    head = b"POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
    # The last piece fills uvicorn's buffer, which pauses reading, and is the end of the request.
    body = bytes(HIGH_WATER_LIMIT + STEP_BYTES + STEP_BYTES // 4)
    app, client = await connected(head % len(body) + body)
    assert len(await _next(app)) > 0
    await client.run_loop(100)
    assert not client.unsent
    assert client.transport.is_paused
    app.answer()
    await client.run_loop()
    assert client.transport.written.startswith(b"HTTP/1.1 401 ")
    assert client.transport.is_closed
    assert not client.transport.has_ended, "the request was read to its end: nothing is dropped"
    assert not client.transport.is_paused


def test_a_client_that_slowly_keeps_sending_after_its_answer_is_disconnected() -> None:
    async def go() -> None:
        _, client = await connected(HEAD, answers=True)
        assert not client.transport.is_closed
        await asyncio.sleep(LINGER_S / 2)
        client.send(ONE)
        assert not client.transport.is_closed
        await asyncio.sleep(LINGER_S)
        assert client.transport.is_closed

    run_virtually(go())


async def test_an_answer_after_the_whole_request_keeps_the_connection() -> None:
    app = App()
    client = Client(app)
    for _ in range(3):
        client.send(HEAD + ONE + b"0\r\n\r\n")
        app.answer()
        await client.run_loop()
        assert not client.transport.is_closed
        assert not client.transport.is_paused
    assert client.transport.written.count(b"HTTP/1.1 401 ") == 3


async def test_pipelined_requests_wait_unparsed_and_are_answered_in_order() -> None:
    app = App()
    client = Client(app)
    count = 2000
    client.send(b"".join(b"GET /%d HTTP/1.1\r\nhost: x\r\n\r\n" % place for place in range(count)))
    # It looks whether its client is still there, as a stream does, which lets the connection read.
    app.ask()
    await client.run_loop()
    assert len(client.connection.pipeline) <= STEP_BYTES // 28
    assert len(client.unsent) > 16 * count
    for place in range(count):
        app.answer()
        await client.run_loop(6)
        assert app.scopes[place]["path"] == f"/{place}"
    assert client.transport.written.count(b"HTTP/1.1 401 ") == count


async def test_trailers_do_not_become_headers() -> None:
    app, client = await connected(HEAD + b"0\r\nauthorization: Bearer stolen\r\n\r\n", answers=True)
    assert [name for name, _ in app.scopes[0]["headers"]] == [b"host", b"transfer-encoding"]
    assert not client.transport.is_closed


@pytest.mark.parametrize("value", [b"a", b"  a", b"a \t ", b"\t a\t"])
async def test_spaces_around_a_header_value_are_removed(value: bytes) -> None:
    # RFC 9110, 5.5
    app, _ = await connected(b"GET / HTTP/1.1\r\nhost: x\r\nlast-event-id:" + value + b"\r\nempty: \t \r\n\r\n")
    assert dict(app.scopes[0]["headers"])[b"last-event-id"] == b"a"
    assert dict(app.scopes[0]["headers"])[b"empty"] == b""


BAD = {
    "a blank before the colon": b"x : y",
    "a folded line": b"x: y\r\n z",
    "a blank before the first name": b" x: y",
    "a bare LF": b"x: y\nz: y",
    "a bare CR": b"x: y\rz",
    "a NUL": b"x: \0",
    "a control character": b"x: \x01",
    "no name": b": y",
    "a name beyond ASCII": b"\xff: y",
    "two lengths": b"content-length: 2\r\ncontent-length: 2",
    "a list of lengths": b"content-length: 2, 2",
    "a length with a sign": b"content-length: +2",
    "a length beyond numbers": b"content-length: " + b"9" * 40,
    "a length and chunks": b"content-length: 2\r\ntransfer-encoding: chunked",
    "chunks and a length": b"transfer-encoding: chunked\r\ncontent-length: 2",
    "chunks twice": b"transfer-encoding: chunked\r\ntransfer-encoding: chunked",
    "chunks that are no last coding": b"transfer-encoding: chunked, gzip",
    "another host": b"host: y",
}
"""RFC 9112: 2.2, 3.2, 5, 6.1 to 6.3."""


@pytest.mark.parametrize("field", BAD.values(), ids=BAD.keys())
async def test_ambiguous_requests_are_refused_and_end_the_connection(field: bytes) -> None:
    app, client = await connected(
        b"POST / HTTP/1.1\r\nhost: x\r\n" + field + b"\r\n\r\nxxGET /hidden HTTP/1.1\r\nhost: x\r\n\r\n"
    )
    assert client.transport.written.startswith(b"HTTP/1.1 400 ")
    assert b"\r\nconnection: close\r\n" in client.transport.written
    assert client.transport.has_ended
    assert not app.scopes


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET / HTTP/2.0\r\nhost: x\r\n\r\n", b"505"),
        (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip, chunked\r\n\r\n", b"501"),
        (b"POST / HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nhost: x\r\n" + b"x: y\r\n" * 100 + b"\r\n", b"431"),
        (b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 20_000, b"431"),
        (b"GET /" + b"y" * 20_000, b"431"),
        (b"\r\n" * 10_000, b"431"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"400"),
        (b"CONNECT x:1 HTTP/1.1\r\nhost: x\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1;" + b"y" * (9 << 20), b"413"),
        (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1\nx", b"400"),
        (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" + b"f" * 40 + b"\r\n", b"400"),
    ],
)
async def test_requests_beyond_the_bounds_are_refused_while_they_arrive(request_bytes: bytes, status: bytes) -> None:
    app = App()
    client = Client(app)
    client.send(request_bytes)
    app.ask()
    while not client.transport.written:
        await client.run_loop()
    assert client.transport.written.startswith(b"HTTP/1.1 " + status)
    assert b"\r\nx-request-id: req-" in client.transport.written
    assert client.transport.written.count(b"HTTP/1.1 ") == 1
    assert client.transport.has_ended


async def test_upgrades_to_other_protocols_are_ignored() -> None:
    app = App()
    client = Client(app)
    upgrade = b"GET /%d HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"
    client.send(upgrade % 1 + upgrade % 2)
    for _ in range(2):
        app.answer()
        await client.run_loop()
    assert [scope["path"] for scope in app.scopes] == ["/1", "/2"]


async def test_a_refused_client_that_has_reset_its_connection_leaves_no_connection() -> None:
    client = Client(App())
    client.transport.is_reset = True
    client.send(b"GET /\x01 HTTP/1.1\r\nhost: x\r\n\r\n")
    await client.run_loop()
    assert client.transport.is_closed
