"""gRPC channels: one set of options for every client."""

from __future__ import annotations

MAX_MESSAGE_BYTES = 16 << 20
"""Above this gRPC itself refuses, on either side; the public service refuses far earlier, with the field's name."""

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # Without it a peer that answers no ping is still believed for a minute.
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    # A dead node's successor listens elsewhere, but a router's at the same address: until its channel has tried again a
    # client takes it for dead.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    # Proxies of the environment are for the outside world, never for a cluster's own connections.
    ("grpc.enable_http_proxy", 0),
)
