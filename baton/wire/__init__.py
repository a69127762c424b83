"""gRPC and Protocol Buffers: codecs, services, clients and servers. Other packages use the dataclasses of
`baton.messages`."""
