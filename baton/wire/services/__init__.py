"""The gRPC services of routers and nodes: each translates between Protocol Buffers and the calls of a handler."""
