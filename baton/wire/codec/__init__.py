"""The codecs of messages, to Protocol Buffers and back. Only services, clients and links of gRPC use them.

`derived` makes a codec from the fields of a dataclass and of its message; the others are by service. What is sent for
each token is written by hand: `report_stream`, and chunks in `generation`.
"""
