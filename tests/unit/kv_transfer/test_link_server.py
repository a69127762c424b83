"""A case of the sender's end of links that a real link can't time; the rest is in tests/contract/test_kv_link.py."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from baton.errors import TransferCause
from kv_transfer.backends.base import PeerMemory
from kv_transfer.layout import PROTOCOL_VERSION, LinkIdentity
from kv_transfer.link.link_codec import write_hello
from kv_transfer.link.link_messages import LinkHello, ReaderMessage
from kv_transfer.link.link_server import LinkServer
from tests.support.handoff_rig import LAYOUT


class _Aborted(Exception):
    pass


class _WelcomeTakesAWhile:
    """A call whose server is closed before its welcome is written."""

    server: LinkServer

    def __init__(self) -> None:
        self._said = iter([write_hello(LinkHello(PROTOCOL_VERSION, "c", "d0", "d0.first", "p0.first", LAYOUT))])

    async def read(self) -> Any:
        return next(self._said, grpc.aio.EOF)  # type: ignore[attr-defined]  # the stubs lack it

    async def write(self, message: Any) -> None:
        self.server.close()

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        raise _Aborted(f"{code.name} {details}")


class _Handler:
    def __init__(self) -> None:
        self.opened: list[str] = []

    def link_opened(self, link: int, node_id: str, incarnation: str, address: str) -> None:
        self.opened.append(incarnation)

    def link_refused(self, node_id: str, cause: TransferCause, detail: str) -> None: ...

    def link_received(self, link: int, message: ReaderMessage) -> None: ...

    def link_closed(self, link: int, reason: str) -> None: ...


async def test_a_link_in_its_handshake_when_the_node_stops_is_not_opened() -> None:
    handler, call = _Handler(), _WelcomeTakesAWhile()
    memory = PeerMemory("p0.first", b"", 0, 1, 64, "DRAM", 0)
    call.server = LinkServer(LinkIdentity("c", "p0", "p0.first", LAYOUT), memory, handler)
    with pytest.raises(_Aborted, match="UNAVAILABLE the node stops"):
        await call.server.Open(None, call)  # type: ignore[arg-type]  # it has what the server calls
    assert not handler.opened
    assert call.server.num_links == 0
