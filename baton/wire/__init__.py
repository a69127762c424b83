"""The wire: Protocol Buffers and gRPC stay in here; everybody else speaks the dataclasses of `baton.messages`."""
