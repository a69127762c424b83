"""The gRPC server of a process: its ports and credentials, its event loop, and the error handling around every call."""
