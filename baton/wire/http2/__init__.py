"""A gRPC server of our own for streams that must cost little: HTTP/2 without I/O, and a thin shell of asyncio."""
