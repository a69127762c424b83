"""The callers' ends of the gRPC services: of clients, of routers towards nodes, of operators."""
