"""The client side of the gRPC services, one module each: for clients, for routers that call nodes, for operators.

Each takes and returns the dataclasses of `baton.messages` and raises BatonErrors. Clients of a cluster use
`baton.client`, which goes on at another router when one is lost.
"""
