"""A network in one process: messages from one name to another arrive in order, with a latency, or when a hold ends.

It carries KvLink, as fakes of a gRPC channel and a gRPC server, and anything that is put into a `Pipe`. As with TCP,
nothing is lost on a live connection: held messages arrive later. A connection that is cut ends for both sides. When
one side ends it, the other side learns of it only if its messages are not held.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import grpc


class Pipe:
    """One direction of a connection. It carries exceptions, too; `read` raises them."""

    def __init__(self, network: FakeNetwork, source: str, target: str) -> None:
        self._network = network
        self.ends = (source, target)
        self._sent: deque[Any] = deque()
        self._due = 0
        """The number of sent items whose latency is over but which are held."""
        self._arrived: asyncio.Queue[Any] = asyncio.Queue()
        self._over: BaseException | None = None
        self._broken = False

    def send(self, item: Any) -> None:
        if self._broken:
            return
        self._sent.append(item)
        asyncio.get_running_loop().call_later(self._network.latency(), self._arrive)

    def _arrive(self) -> None:
        if self._broken:
            return
        self._due += 1
        if not self._network.is_held(*self.ends):
            self.let_through()

    def let_through(self) -> None:
        """Deliver the held items."""
        while self._due:
            self._due -= 1
            self._arrived.put_nowait(self._sent.popleft())

    def break_off(self, error: BaseException) -> None:
        """Break the connection: the target gets the error at once and nothing after it."""
        self._broken = True
        self._sent.clear()
        self._due = 0
        self._arrived.put_nowait(error)

    async def read(self) -> Any:
        if self._over is not None:
            raise self._over
        item = await self._arrived.get()
        if isinstance(item, BaseException):
            self._over = item
            raise item
        return item


class FakeNetwork:
    """All names, the directions that are held at the moment, and the connections between names."""

    def __init__(self, latency: Callable[[], float] = lambda: 0.0005) -> None:
        self.latency = latency
        self._held: set[tuple[str, str]] = set()
        self._silent: set[str] = set()
        self._servers: dict[str, tuple[str, Any]] = {}
        self.connections: list[Connection] = []
        self._pipes: list[Pipe] = []

    def pipe(self, source: str, target: str) -> Pipe:
        made = Pipe(self, source, target)
        self._pipes.append(made)
        return made

    def hold(self, source: str, target: str) -> None:
        """Hold everything that the source sends to the target from now on."""
        self._held.add((source, target))

    def let_through(self, source: str, target: str) -> None:
        """Undo `hold`; held messages arrive now."""
        self._held.discard((source, target))
        self._let_through()

    def silence(self, name: str) -> None:
        """Hold everything that this name sends or is sent from now on."""
        self._silent.add(name)

    def unsilence(self, name: str) -> None:
        """Undo `silence`."""
        self._silent.discard(name)
        self._let_through()

    def heal(self) -> None:
        """Undo every `hold` and `silence`."""
        self._held.clear()
        self._silent.clear()
        self._let_through()

    def _let_through(self) -> None:
        for pipe in self._pipes:
            if not self.is_held(*pipe.ends):
                pipe.let_through()

    def is_held(self, source: str, target: str) -> bool:
        """Whether messages from the source to the target are held at the moment."""
        return (source, target) in self._held or not self._silent.isdisjoint((source, target))

    def serve(self, name: str, address: str, servicer: Any) -> None:
        """Let a server listen on this address."""
        self._servers[address] = (name, servicer)

    def server(self, address: str) -> tuple[str, Any] | None:
        return self._servers.get(address)

    async def answers(self, name: str, address: str) -> bool:
        """Whether a server on this address would answer a new connection from this name."""
        server, _ = self._servers.get(address, (None, None))
        return server is not None and not self.is_held(name, server) and not self.is_held(server, name)

    def channel(self, name: str, address: str) -> FakeChannel:
        """Return what `grpc.aio.insecure_channel` would return to that process."""
        return FakeChannel(self, name, address)

    def between(self, one: str, other: str) -> Iterator[Connection]:
        ends = {one, other}
        return (connection for connection in list(self.connections) if {connection.client, connection.server} == ends)

    def forget(self, name: str) -> None:
        """Remove a process that is gone: nobody listens on its address, and its connections break."""
        self._servers = {address: entry for address, entry in self._servers.items() if entry[0] != name}
        for connection in list(self.connections):
            if name in (connection.client, connection.server):
                connection.cut()
        self._pipes = [pipe for pipe in self._pipes if name not in pipe.ends]


class FakeServer:
    """A gRPC server that holds one `KvLink` servicer."""

    def __init__(self) -> None:
        self.servicer: Any = None

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        return

    def add_registered_method_handlers(self, name: str, handlers: Any) -> None:
        (handler,) = handlers.values()
        self.servicer = handler.stream_stream


class FakeChannel:
    """A gRPC channel with at most one call."""

    def __init__(self, network: FakeNetwork, name: str, address: str) -> None:
        self._network = network
        self._name = name
        self._address = address
        self._connection: Connection | None = None

    def stream_stream(self, path: str, **kwargs: Any) -> Callable[[], Connection]:
        return self._call

    def _call(self) -> Connection:
        self._connection = Connection(self._network, self._name, self._network.server(self._address))
        return self._connection

    async def close(self, grace: float | None = None) -> None:
        if self._connection is not None:
            self._connection.hang_up()


class _HungUp(Exception):
    """The client ended the call."""


class _Aborted(Exception):
    """The server ended the call."""


class Connection:
    """One call, as its client sees it: `write` and `read`."""

    def __init__(self, network: FakeNetwork, client: str, server: tuple[str, Any] | None) -> None:
        self.client = client
        self.server = server[0] if server else ""
        self._network = network
        self._up = network.pipe(client, self.server)
        self._down = network.pipe(self.server, client)
        self._task: asyncio.Task[None] | None = None
        if server is None:
            self._down.send(_unavailable("nobody listens"))
            return
        network.connections.append(self)
        self._task = asyncio.create_task(self._serve(server[1]), name=f"call {client}>{self.server}")

    async def write(self, message: Any) -> None:
        self._up.send(message)

    async def read(self) -> Any:
        return await self._down.read()

    def hang_up(self) -> None:
        """End the call as the client; the server learns of it unless messages are held."""
        self._up.send(_HungUp())

    def cut(self) -> None:
        """Break the connection for both sides at once."""
        self._down.break_off(_unavailable("connection reset"))
        if self._task is not None:
            self._task.cancel()

    async def _serve(self, open_call: Any) -> None:
        error = _unavailable("the call is over")
        context = _Context(self._up, self._down)
        serving = asyncio.ensure_future(open_call(None, context))
        context.serving = serving
        try:
            await serving
        except _Aborted as aborted:
            (error,) = aborted.args
        except asyncio.CancelledError:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
        finally:
            self._network.connections.remove(self)
            self._down.send(error)


class _Context:
    """The call as its servicer sees it."""

    def __init__(self, up: Pipe, down: Pipe) -> None:
        self._up = up
        self._down = down
        self.serving: asyncio.Future[None] | None = None

    async def read(self) -> Any:
        try:
            return await self._up.read()
        except _HungUp:
            # gRPC cancels the handler of a call whose client is gone.
            assert self.serving is not None
            self.serving.cancel()
            await asyncio.sleep(0)
            raise asyncio.CancelledError from None

    async def write(self, message: Any) -> None:
        self._down.send(message)

    async def abort(self, code: grpc.StatusCode, details: str, metadata: Any = ()) -> None:
        raise _Aborted(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, details, details))


def _unavailable(details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), details, details)
