"""gRPC and Protocol Buffers. All other packages use the dataclasses of `baton.messages`."""
