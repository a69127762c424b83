"""The paths of all RPCs that Baton's servers answer, from the descriptors."""

from __future__ import annotations

from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from baton.v1 import encoder_rows_pb2, generation_pb2, kv_link_pb2, node_pb2, operator_pb2

_FILES = (generation_pb2, node_pb2, kv_link_pb2, encoder_rows_pb2, operator_pb2, health_pb2, reflection_pb2)
METHODS = tuple(
    f"/{service.full_name}/{method.name}"
    for file in _FILES
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
)
