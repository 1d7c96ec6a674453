"""gRPC server reflection, as v1 and v1alpha.

grpcio-reflection ships v1alpha only. The messages of v1 are the same on the wire, so one servicer
answers both; the v1 file descriptor is derived, so that v1 can describe itself too.
"""

from collections.abc import Iterable

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2
from grpc_reflection.v1alpha._async import ReflectionServicer

_V1_FILE = "grpc/reflection/v1/reflection.proto"
_V1 = "grpc.reflection.v1"
_V1_SERVICE = f"{_V1}.ServerReflection"
_HEALTH_SERVICE: str = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name


def add_reflection(server: grpc.aio.Server, service_names: Iterable[str]) -> None:
    """Serve reflection over the named services, health and reflection itself."""
    _register_v1_descriptor()
    names = (*service_names, _HEALTH_SERVICE, _V1_SERVICE, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    servicer = ReflectionServicer(names)
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    service = grpc.method_handlers_generic_handler(_V1_SERVICE, {"ServerReflectionInfo": method})
    server.add_generic_rpc_handlers((service,))


def _register_v1_descriptor() -> None:
    pool = descriptor_pool.Default()
    try:
        pool.FindFileByName(_V1_FILE)
    except KeyError:
        file = descriptor_pb2.FileDescriptorProto()
        reflection_pb2.DESCRIPTOR.CopyToProto(file)
        old, new = f".{file.package}.", f".{_V1}."
        file.name, file.package = _V1_FILE, _V1
        for message in file.message_type:
            for field in message.field:
                if field.type_name:
                    field.type_name = field.type_name.replace(old, new)
        for service in file.service:
            for rpc in service.method:
                rpc.input_type = rpc.input_type.replace(old, new)
                rpc.output_type = rpc.output_type.replace(old, new)
        file.ClearField("options")  # package and class names of the v1alpha stubs
        pool.Add(file)
