"""The options of all gRPC channels."""

from __future__ import annotations

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
