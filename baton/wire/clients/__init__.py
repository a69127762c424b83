"""The client side of the gRPC services: for clients, for routers that call nodes, and for operators."""
