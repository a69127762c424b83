"""The gRPC services that routers and nodes offer: each takes a core and translates between it and the wire."""
