"""Makes, binds, starts and stops gRPC servers."""

from __future__ import annotations

import socket

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from baton.errors import ConfigError
from baton.security.connection_limit import ConnectionLimit, Limits
from baton.security.tls_files import TlsFiles
from baton.wire import credentials
from baton.wire.credentials import MAX_MESSAGE_BYTES
from baton.wire.http2.server import Http2Server
from baton.wire.server.fault_barrier import FaultBarrier
from baton.wire.turn_budget import TurnBudget

SERVICE_NAME = "grpc.reflection.v1.ServerReflection"
_FILE = "grpc/reflection/v1/reflection.proto"
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_WILDCARDS = ("", "0.0.0.0", "::")
MAX_METADATA_BYTES = 8 << 10
"""Limit of the metadata of a call, in bytes."""
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Otherwise a second server on a port in use would get half of the connections instead of an error.
    ("grpc.so_reuseport", 0),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    # Otherwise gRPC refuses larger metadata only with some probability.
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # The connection of a client that is stopped, or whose machine is down, stays open, and its requests would run on.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
)


def add_reflection(service_names: tuple[str, ...], server: grpc.aio.Server) -> None:
    """Add reflection for these services, and for reflection itself, to the server."""
    _describe_v1()
    names = (*service_names, reflection.SERVICE_NAME, SERVICE_NAME)
    servicer = reflection.aio.ReflectionServicer(names)  # type: ignore[attr-defined]
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    for name in (reflection.SERVICE_NAME, SERVICE_NAME):
        handler = grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": method})
        server.add_generic_rpc_handlers((handler,))


def _describe_v1() -> None:
    """Add v1 to the descriptor pool: v1alpha's file under the package name of v1."""
    pool = descriptor_pool.Default()
    try:
        pool.FindFileByName(_FILE)
    except KeyError:
        pool.AddSerializedFile(_v1_file().SerializeToString())


def _v1_file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(file)
    alpha = f".{file.package}."
    file.name, file.package = _FILE, SERVICE_NAME.rpartition(".")[0]
    named = f".{file.package}."
    for message in file.message_type:
        for field in message.field:
            if field.type_name:
                field.type_name = field.type_name.replace(alpha, named)
    for method in file.service[0].method:
        method.input_type = method.input_type.replace(alpha, named)
        method.output_type = method.output_type.replace(alpha, named)
    return file


def _options() -> tuple[tuple[str, int], ...]:
    """The options of a grpc.aio server, with a limit of the connections to each port: further ones are closed.

    grpcio has no limit of the connections from each address.
    """
    return (*_OPTIONS, ("grpc.max_allowed_incoming_connections", Limits.of_this_process().listener))


class RpcServer:
    """A gRPC server with health and reflection. Servicers are added to `server` before `start`."""

    def __init__(
        self,
        service_names: tuple[str, ...],
        barrier: FaultBarrier | None = None,
        tls: credentials.Tls | None = None,
        *,
        asks_certificates: bool = False,
        http2_server: Http2Server | None = None,
    ) -> None:
        """`asks_certificates`: with TLS, clients must show a certificate of the same authority. `http2_server`: Baton's
        own server, with a barrier and TLS of its own, in place of grpc.aio's.
        """
        self._tls = tls
        self._asks_certificates = asks_certificates
        self._http2_server = http2_server
        self.server = http2_server or grpc.aio.server(interceptors=(barrier or FaultBarrier(),), options=_options())
        self._services = service_names
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        add_reflection((*service_names, health.SERVICE_NAME), self.server)

    @property
    def num_connections(self) -> int | None:
        """Open connections; None for grpc.aio's server, which does not count them."""
        return len(self._http2_server.connections) if self._http2_server is not None else None

    @property
    def num_calls(self) -> int | None:
        """Running calls; None for grpc.aio's server, which does not count them."""
        return self._http2_server.num_calls if self._http2_server is not None else None

    def bind(self, host: str, port: int) -> int:
        """Listen on a port (0: any free one) and return it. Raises ConfigError if the port can't be used."""
        address = join_address(host, port)
        try:
            if self._tls is not None and self._http2_server is None:
                tls = credentials.server_credentials(self._tls, asks_certificates=self._asks_certificates)
                return self.server.add_secure_port(address, tls)
            return self.server.add_insecure_port(address)
        except RuntimeError as error:
            raise ConfigError(
                f"can't listen on {address}: the port is in use, or the address is not one of this machine; "
                "choose another one"
            ) from error

    async def start(self) -> None:
        """Start serving. The process is reported as healthy at once, and its services after `set_ready`."""
        await self.server.start()
        await self._health.set("", _SERVING)
        await self.set_ready(False)

    async def set_ready(self, ready: bool) -> None:
        """Set what the health service reports for the named services.

        The process ("") is always reported as serving.
        """
        for name in self._services:
            await self._health.set(name, _SERVING if ready else _NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, give running ones `grace_s` seconds to end, then cancel them."""
        await self._health.enter_graceful_shutdown()
        await self.server.stop(grace_s)


def reached_as(host: str) -> str:
    """The host name under which other machines reach a server that listens on HOST.

    That is HOST itself, except for a wildcard address, which stands for the name of this machine.
    """
    return socket.gethostname() if host in _WILDCARDS else host


def streaming_server(
    service_names: tuple[str, ...],
    barrier: FaultBarrier,
    tls: TlsFiles | None,
    limit: ConnectionLimit | None = None,
    budget: TurnBudget | None = None,
) -> RpcServer:
    """A server for thousands of streaming clients, on `baton.wire.http2`.

    `limit`, `budget`: the process's limit of connections, and its time budget for their input. Raises ConfigError.
    """
    http2_server = Http2Server(
        (barrier,),
        tls.server_context("h2") if tls is not None else None,
        max_message_bytes=MAX_MESSAGE_BYTES,
        max_metadata_bytes=MAX_METADATA_BYTES,
        limit=limit,
        budget=budget,
        authenticator=barrier.authenticator,
    )
    return RpcServer(service_names, http2_server=http2_server)


def join_address(host: str, port: int) -> str:
    """HOST:PORT, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
