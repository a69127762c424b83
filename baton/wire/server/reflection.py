"""gRPC server reflection, v1 and v1alpha. Newer clients call v1, while grpcio implements v1alpha only.

Both have the same messages under two package names, so that one servicer answers both.
"""

from __future__ import annotations

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import reflection, reflection_pb2

SERVICE_NAME = "grpc.reflection.v1.ServerReflection"
_FILE = "grpc/reflection/v1/reflection.proto"


def add_reflection(service_names: tuple[str, ...], server: grpc.aio.Server) -> None:
    """Add reflection for these services, and for reflection itself, to the server."""
    _describe_v1()
    names = (*service_names, reflection.SERVICE_NAME, SERVICE_NAME)
    servicer = reflection.aio.ReflectionServicer(names)  # type: ignore[attr-defined]
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    for name in (reflection.SERVICE_NAME, SERVICE_NAME):
        handler = grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": method})
        server.add_generic_rpc_handlers((handler,))


def _describe_v1() -> None:
    """Add v1 to the descriptor pool: v1alpha's file under the package name of v1."""
    pool = descriptor_pool.Default()
    try:
        pool.FindFileByName(_FILE)
    except KeyError:
        pool.AddSerializedFile(_v1_file().SerializeToString())


def _v1_file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(file)
    alpha = f".{file.package}."
    file.name, file.package = _FILE, SERVICE_NAME.rpartition(".")[0]
    named = f".{file.package}."
    for message in file.message_type:
        for field in message.field:
            if field.type_name:
                field.type_name = field.type_name.replace(alpha, named)
    for method in file.service[0].method:
        method.input_type = method.input_type.replace(alpha, named)
        method.output_type = method.output_type.replace(alpha, named)
    return file
