"""The codecs of messages, to Protocol Buffers and back. Only services, clients and links of gRPC use them."""
