"""Cases of the sender's end of links that a real link can't time or send; the rest is in
tests/contract/test_kv_link.py."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import pytest

from baton.errors import TransferCause
from kv_transfer.backends.base import PeerMemory
from kv_transfer.layout import PROTOCOL_VERSION, LinkIdentity, PeerNode
from kv_transfer.link.link_codec import write_hello
from kv_transfer.link.link_messages import LinkHello, ProbeReady, ReaderMessage
from kv_transfer.link.link_server import LinkServer
from tests.support.handoff_rig import LAYOUT

HELLO = LinkHello(PROTOCOL_VERSION, "c", "d0", "d0.first", "p0.first", LAYOUT)
NODE = PeerNode.of(PeerMemory("p0.first", b"", 0, 1, 64, "DRAM", 0))


class _Aborted(Exception):
    pass


class _WelcomeTakesAWhile:
    """A call whose server is closed before its welcome is written."""

    server: LinkServer

    def __init__(self, hello: LinkHello = HELLO) -> None:
        self._said = iter([write_hello(hello)])

    async def read(self) -> Any:
        return next(self._said, grpc.aio.EOF)  # type: ignore[attr-defined]  # the stubs lack it

    async def write(self, message: Any) -> None:
        self.server.close()

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        raise _Aborted(f"{code.name} {details}")


class _Handler:
    def __init__(self) -> None:
        self.opened: list[str] = []
        self.refused: list[tuple[str, TransferCause]] = []

    def link_opened(self, link: int, node_id: str, incarnation: str, address: str, block_size: int) -> None:
        self.opened.append(incarnation)

    def link_refused(self, node_id: str, cause: TransferCause, detail: str) -> None:
        self.refused.append((node_id, cause))

    def link_received(self, link: int, message: ReaderMessage) -> None: ...

    def link_closed(self, link: int, reason: str) -> None: ...


async def test_a_link_in_its_handshake_when_the_node_stops_is_not_opened() -> None:
    handler, call = _Handler(), _WelcomeTakesAWhile()
    call.server = LinkServer(LinkIdentity("c", "p0", "p0.first", LAYOUT), NODE, handler)
    with pytest.raises(_Aborted, match="UNAVAILABLE the node stops"):
        await call.server.Open(None, call)  # type: ignore[arg-type]  # it has what the server calls
    assert not handler.opened
    assert call.server.num_links == 0


LONG = "x" * 1_000_000


@pytest.mark.parametrize(
    "hello",
    [
        replace(HELLO, node_id=LONG),
        replace(HELLO, incarnation=LONG),
        replace(HELLO, peer_incarnation=LONG),
        replace(HELLO, address=LONG),
    ],
    ids=["node_id", "incarnation", "peer_incarnation", "address"],
)
async def test_a_hello_with_a_name_that_is_too_long_is_refused_and_not_kept(hello: LinkHello) -> None:
    handler, call = _Handler(), _WelcomeTakesAWhile(hello)
    call.server = LinkServer(LinkIdentity("c", "p0", "p0.first", LAYOUT), NODE, handler)
    with pytest.raises(_Aborted, match=r"FAILED_PRECONDITION.* 1000000 characters") as refused:
        await call.server.Open(None, call)  # type: ignore[arg-type]  # it has what the server calls
    assert len(str(refused.value)) < 200
    ((node_id, cause),) = handler.refused
    assert len(node_id) <= 128
    assert cause is TransferCause.REFUSED
    assert not handler.opened


async def test_a_hello_with_names_of_the_longest_length_opens_a_link() -> None:
    hello = replace(HELLO, node_id="x" * 128, incarnation="y" * 128, address="z" * 300)
    handler, call = _Handler(), _WelcomeTakesAWhile(hello)
    call.server = LinkServer(LinkIdentity("c", "p0", "p0.first", LAYOUT), NODE, handler)
    # It is welcomed, at which moment this server is closed.
    with pytest.raises(_Aborted, match="UNAVAILABLE the node stops"):
        await call.server.Open(None, call)  # type: ignore[arg-type]  # it has what the server calls
    assert not handler.refused


class _TakesNothing(_WelcomeTakesAWhile):
    """A call whose reader gets its welcome, and then neither sends nor takes anything."""

    def __init__(self) -> None:
        super().__init__()
        self.trailing_metadata: Any = None
        self._welcomed = False

    async def read(self) -> Any:
        return await (super().read() if not self._welcomed else asyncio.Future[Any]())

    async def write(self, message: Any) -> None:
        if self._welcomed:
            await asyncio.Future[None]()
        self._welcomed = True

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        self.trailing_metadata = trailing_metadata
        await super().abort(code, details)


class _Floods(_Handler):
    """Sends more than a link holds as soon as it is open, and cuts it for another reason then."""

    server: LinkServer

    def link_opened(self, link: int, node_id: str, incarnation: str, address: str, block_size: int) -> None:
        for number in range(10_000):
            self.server.send(link, ProbeReady(number, 0, 0))
        self.server.cut(link, "wrong bytes", TransferCause.PROBE_FAILED)


async def test_a_link_that_is_cut_twice_ends_with_reason_and_cause_of_the_first() -> None:
    handler, call = _Floods(), _TakesNothing()
    handler.server = LinkServer(LinkIdentity("c", "p0", "p0.first", LAYOUT), NODE, handler)
    with pytest.raises(_Aborted, match="UNAVAILABLE the peer does not take its messages"):
        await handler.server.Open(None, call)  # type: ignore[arg-type]  # it has what the server calls
    assert call.trailing_metadata == ()


class _Gone(_WelcomeTakesAWhile):
    """A call whose reader was killed before its hello came."""

    async def read(self) -> Any:
        return grpc.aio.EOF  # type: ignore[attr-defined]  # the stubs lack it

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        raise grpc.aio.InternalError("execute_batch")


async def test_a_reader_that_is_killed_before_its_hello_is_no_fault() -> None:
    server = LinkServer(LinkIdentity("c", "p0", "p0.first", LAYOUT), NODE, _Handler())
    with pytest.raises(asyncio.CancelledError, match="has left"):
        await server.Open(None, _Gone())  # type: ignore[arg-type]  # it has what the server calls
