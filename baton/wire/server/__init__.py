"""The gRPC server of a process: ports and credentials, its event loop, and the barrier around every call."""
