"""`GET /metrics`, `/livez` and `/readyz` on a port of their own. Each connection gets one answer."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

from baton.errors import BatonError, ConfigError, InvalidRequest, Unauthenticated
from baton.observe.listener import Listener, listening_socket
from baton.observe.metrics import CONTENT_TYPE
from baton.security.connection_limit import ConnectionLimit, Place
from baton.security.http_access import PageAuthenticator
from baton.security.tls_files import TlsFiles

_MAX_HEAD_BYTES = 8 << 10


class MetricsPage:
    """An HTTP server for Prometheus and for the probes of Kubernetes: metrics, liveness and readiness."""

    def __init__(
        self,
        text: Callable[[], bytes],
        authenticator: PageAuthenticator | None = None,
        tls: TlsFiles | None = None,
        is_ready: Callable[[], bool] = lambda: True,
        limit: ConnectionLimit | None = None,
        timeout_s: float = 5.0,
    ) -> None:
        """`text` returns the metrics in Prometheus's text format; it is called for each request.

        Without an authenticator every caller is permitted. `limit` counts all connections of the process; without one
        the page has a limit of its own. `timeout_s`: how long a caller may take to send its request and to read the
        whole answer.
        """
        self._limit = limit or ConnectionLimit()
        self._timeout_s = timeout_s
        self._socket: socket.socket | None = None
        self._text = text
        self._is_ready = is_ready
        self._authenticator = authenticator or PageAuthenticator()
        self._tls = tls
        self._listener: Listener | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen (port 0: on a free one) and return the port. Raises ConfigError if it can't be opened."""
        try:
            context = self._tls.server_context() if self._tls is not None else None
            self._socket = listening_socket(host, port)
        except OSError as error:
            raise ConfigError(
                f"can't listen on {host}:{port} for metrics: the port is in use, or the address is not one of this "
                "machine; choose another one with --metrics-port, 0 takes a free one"
            ) from error
        bound: int = self._socket.getsockname()[1]
        self._listener = Listener(f"metrics {bound}", self._socket, self._connection, self._limit, context)
        self._listener.start()
        return bound

    async def stop(self) -> None:
        """Accept no more connections. Those that are open end within the timeout of one answer. Idempotent."""
        if self._listener is not None and self._socket is not None:
            self._listener.stop()
            self._socket.close()
            self._listener = self._socket = None

    def _connection(self, place: Place) -> asyncio.StreamReaderProtocol:
        return _Connection(place, asyncio.StreamReader(_MAX_HEAD_BYTES), self._answer)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._response(head))
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            # A caller that sends no request, or does not read the answer, gets nothing more.
            pass
        finally:
            writer.transport.abort()

    def _response(self, head: bytes) -> bytes:
        method, _, rest = head.partition(b" ")
        path = rest.split(None, 1)[0].partition(b"?")[0] if rest.strip() else b""
        try:
            self._authenticator.check(path.decode("latin-1"), _headers(head))
        except InvalidRequest as error:
            return _http("400 Bad Request", "text/plain", f"{error}\n".encode())
        except BatonError as error:
            status = "401 Unauthorized" if isinstance(error, Unauthenticated) else "403 Forbidden"
            return _http(status, "text/plain", f"{error}\n".encode())
        if path not in (b"/metrics", b"/livez", b"/readyz"):
            return _http("404 Not Found", "text/plain", b"the pages are /metrics, /livez and /readyz\n")
        if method != b"GET":
            return _http("405 Method Not Allowed", "text/plain", b"GET it\n")
        if path == b"/metrics":
            return _http("200 OK", CONTENT_TYPE, self._text())
        if path == b"/livez" or self._is_ready():
            return _http("200 OK", "text/plain", b"ok\n")
        return _http("503 Service Unavailable", "text/plain", b"not ready\n")


class _Connection(asyncio.StreamReaderProtocol):
    """A stream protocol that releases its place in the connection limit when the connection is lost."""

    def __init__(
        self,
        place: Place,
        reader: asyncio.StreamReader,
        answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
    ) -> None:
        super().__init__(reader, answer)
        self._place = place

    def connection_lost(self, exc: Exception | None) -> None:
        self._place.release()
        super().connection_lost(exc)


def _headers(head: bytes) -> list[tuple[bytes, bytes]]:
    pairs = [line.partition(b":") for line in head.split(b"\r\n")[1:]]
    return [(name.strip().lower(), value.strip()) for name, _, value in pairs]


def _http(status: str, content_type: str, body: bytes) -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n"
    return head.encode() + b"\r\n" + body
