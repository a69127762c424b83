"""gRPC servers: one way to make, bind and stop them."""

from __future__ import annotations

import socket

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from baton.errors import ConfigError
from baton.security.connection_limit import ConnectionLimit, Limits
from baton.security.tls_files import TlsFiles
from baton.wire import credentials
from baton.wire.channel import MAX_MESSAGE_BYTES
from baton.wire.http2.server import Http2Server
from baton.wire.server.fault_barrier import FaultBarrier
from baton.wire.server.reflection import add_reflection
from baton.wire.turn_budget import TurnBudget

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

_WILDCARDS = ("", "0.0.0.0", "::")
MAX_METADATA_BYTES = 8 << 10
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Without this, a second server on a taken port gets half of its connections instead of an error.
    ("grpc.so_reuseport", 0),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    # Without this, what is larger is refused by chance only.
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # A caller whose machine is gone, or whose process is stopped, closes nothing: what it asked for would run on.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
)


def _options() -> tuple[tuple[str, int], ...]:
    """grpcio counts the connections of a port, not those of an address. What comes beyond it closes."""
    return (*_OPTIONS, ("grpc.max_allowed_incoming_connections", Limits.of_this_process().listener))


class RpcServer:
    """A grpc.aio server with health and reflection. `server` takes the servicers before `start`."""

    def __init__(
        self,
        service_names: tuple[str, ...],
        barrier: FaultBarrier | None = None,
        tls: credentials.Tls | None = None,
        *,
        asks_certificates: bool = False,
        ours: Http2Server | None = None,
    ) -> None:
        """`asks_certificates`: with TLS, whoever connects must show one of the same authority. `ours` takes the
        place of grpc.aio's server, with the barrier and the TLS that it was given.
        """
        self._tls = tls
        self._asks_certificates = asks_certificates
        self._ours = ours
        self.server = ours or grpc.aio.server(interceptors=(barrier or FaultBarrier(),), options=_options())
        self._services = service_names
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        add_reflection((*service_names, health.SERVICE_NAME), self.server)

    @property
    def num_connections(self) -> int | None:
        """Open ones; None: grpc.aio's server does not say."""
        return len(self._ours.connections) if self._ours is not None else None

    @property
    def num_calls(self) -> int | None:
        """Calls that have begun and not ended; None: grpc.aio's server does not say."""
        return self._ours.num_calls if self._ours is not None else None

    def bind(self, host: str, port: int) -> int:
        """Take a port (0: pick one) and return it; raises ConfigError when it can't be had."""
        address = join_address(host, port)
        try:
            if self._tls is not None and self._ours is None:
                asks = self._asks_certificates
                return self.server.add_secure_port(address, credentials.of_server(self._tls, asks_certificates=asks))
            return self.server.add_insecure_port(address)
        except RuntimeError as error:
            story = f"can't listen on {address}: the port is taken or not ours; choose another one"
            raise ConfigError(story) from error

    async def start(self) -> None:
        """Serve. The process counts as healthy from now on, the named services once `set_ready` says so."""
        await self.server.start()
        await self._health.set("", _SERVING)
        await self.set_ready(False)

    async def set_ready(self, ready: bool) -> None:
        """What the health service says of the named services; "" (the process) is serving all along."""
        for name in self._services:
            await self._health.set(name, _SERVING if ready else _NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, let running ones end within the grace, then cancel them."""
        await self._health.enter_graceful_shutdown()
        await self.server.stop(grace_s)


def reached_as(host: str) -> str:
    """Where others reach what listens on HOST: this machine's name when that is every address of it."""
    return socket.gethostname() if host in _WILDCARDS else host


def streaming_server(
    service_names: tuple[str, ...],
    barrier: FaultBarrier,
    tls: TlsFiles | None,
    limit: ConnectionLimit | None = None,
    budget: TurnBudget | None = None,
) -> RpcServer:
    """One that thousands of clients may stream from; see `baton.wire.http2`. `limit` and `budget`: of the process's
    connections. Raises ConfigError.
    """
    ours = Http2Server(
        (barrier,),
        tls.server_context("h2") if tls is not None else None,
        max_message_bytes=MAX_MESSAGE_BYTES,
        max_metadata_bytes=MAX_METADATA_BYTES,
        limit=limit,
        budget=budget,
        door=barrier.door,
    )
    return RpcServer(service_names, ours=ours)


def join_address(host: str, port: int) -> str:
    """HOST:PORT, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
