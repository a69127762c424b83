"""The options of all gRPC channels, and TLS credentials for gRPC servers and clients.

Within a cluster a peer is identified by the role in its certificate (`node.CLUSTER.baton`), not by its address, because
nodes start at addresses that no certificate could list in advance. At the public port clients check the host name of
the address that they call, as for any web site.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import grpc

from baton.security.access import Access
from baton.security.matrix import CallerRole, certificate_name
from baton.security.tls_files import LiveTls, TlsBytes

MAX_MESSAGE_BYTES = 16 << 20
"""Largest message that gRPC accepts, in bytes. The public service has a much lower limit, and names the field."""

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # Otherwise a peer that answers no ping counts as alive for another minute.
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    # A router that is restarted listens at the same address: until its channel has tried to connect again, a client
    # takes the router for dead.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    # Proxies that the environment names are for the internet, not for connections within a cluster.
    ("grpc.enable_http_proxy", 0),
)


Tls = TlsBytes | LiveTls
"""TLS files whose present contents are read with `now()` before each handshake."""


def server_credentials(tls: Tls, *, asks_certificates: bool) -> grpc.ServerCredentials:
    """The credentials of a gRPC server, which follow the files when they change.

    `asks_certificates`: clients must show a certificate of the same authority.
    """
    shown = tls.now()

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal shown
        if tls.now() is shown:
            return None
        shown = tls.now()
        return _configuration(shown, asks_certificates=asks_certificates)

    first = _configuration(shown, asks_certificates=asks_certificates)
    # grpc's type stubs lack that None means no change.
    return grpc.dynamic_ssl_server_credentials(first, renewed, asks_certificates)  # type: ignore[arg-type]


def _configuration(tls: TlsBytes, *, asks_certificates: bool) -> grpc.ServerCertificateConfiguration:
    assert tls.key is not None
    assert tls.cert is not None
    return grpc.ssl_server_certificate_configuration([(tls.key, tls.cert)], tls.ca if asks_certificates else None)


@dataclass(frozen=True, slots=True)
class Dialer:
    """Opens channels to servers with TLS and an API key. The default is clear text without a key."""

    tls: Tls | None = None
    peer: str = ""
    """The name that the server's certificate must have; empty: the host of the address."""
    api_key: str = ""

    @classmethod
    def to_role(cls, role: CallerRole, cluster: str, tls: Tls | None) -> Dialer:
        """A dialer for the processes of a cluster that have this role."""
        return cls(tls, certificate_name(role, cluster) if tls is not None else "")

    @classmethod
    def to_public(cls, access: Access) -> Dialer:
        """A dialer for a router's public port, with the API key. Raises ConfigError."""
        tls = access.tls()
        return cls(None if tls is None else TlsBytes(tls.ca, None, None), api_key=access.api_key)

    @classmethod
    def to_operator(cls, access: Access) -> Dialer:
        """A dialer for a router's operator port. Raises ConfigError."""
        dialer = cls.to_role(CallerRole.ROUTER, access.cluster, access.tls())
        return replace(dialer, api_key=access.api_key)

    @classmethod
    def to_nodes(cls, access: Access) -> Dialer:
        """A dialer for nodes, for operators. Raises ConfigError."""
        return cls.to_role(CallerRole.NODE, access.cluster, access.tls())

    @property
    def metadata(self) -> Sequence[tuple[str, str]] | None:
        """Metadata to send with every call; None: none."""
        return (("authorization", f"Bearer {self.api_key}"),) if self.api_key else None

    def context(self) -> ssl.SSLContext | None:
        """The context for Baton's own connections (`baton.wire.http2`), which check `peer`. None: clear text."""
        return self.tls.now().client_context() if self.tls is not None else None

    def channel(self, address: str, *more: tuple[str, int]) -> grpc.aio.Channel:
        """An asyncio channel. `more`: gRPC options in addition to CHANNEL_OPTIONS."""
        options = [*CHANNEL_OPTIONS, *more]
        if self.tls is None:
            return grpc.aio.insecure_channel(address, options=options)
        return grpc.aio.secure_channel(address, _credentials(self.tls), options=[*options, *self._name()])

    def blocking_channel(self, address: str) -> grpc.Channel:
        """A blocking channel, which adds the key to every call.

        On an event loop that would cost a task for each call: the users of `channel` pass `metadata` themselves.
        """
        if self.tls is None:
            channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        else:
            options = [*CHANNEL_OPTIONS, *self._name()]
            channel = grpc.secure_channel(address, _credentials(self.tls), options=options)
        return grpc.intercept_channel(channel, _KeyInterceptor(self.metadata)) if self.metadata else channel

    def _name(self) -> Sequence[tuple[str, str]]:
        return (("grpc.ssl_target_name_override", self.peer),) if self.peer else ()


PLAINTEXT_DIALER = Dialer()
"""Opens channels in clear text, without a key."""


class _Details(NamedTuple):
    method: str
    timeout: float | None
    metadata: Sequence[tuple[str, str]]
    credentials: Any
    wait_for_ready: bool | None
    compression: Any


class _KeyInterceptor(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):  # type: ignore[type-arg]
    """Adds the API key to every call."""

    def __init__(self, metadata: Sequence[tuple[str, str]]) -> None:
        self._metadata = metadata

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return continuation(self._with_key(client_call_details), request)

    def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return continuation(self._with_key(client_call_details), request)

    def _with_key(self, call: Any) -> Any:
        metadata = [*(call.metadata or ()), *self._metadata]
        return _Details(call.method, call.timeout, metadata, call.credentials, call.wait_for_ready, call.compression)


def _credentials(tls: Tls) -> grpc.ChannelCredentials:
    tls = tls.now()
    return grpc.ssl_channel_credentials(tls.ca, tls.key, tls.cert)
