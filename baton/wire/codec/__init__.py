"""Messages to Protocol Buffers and back. Only the services and clients of `baton.wire` have use for it."""
