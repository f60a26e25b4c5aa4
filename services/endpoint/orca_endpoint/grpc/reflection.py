"""gRPC reflection, v1 and v1alpha: tools such as grpcurl ask the server for its contract."""

from collections.abc import Sequence
from typing import Any

import grpc
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pool import Default
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection import SERVICE_NAME
from grpc_reflection.v1alpha.reflection import aio as reflection  # pyright: ignore[reportAttributeAccessIssue]

# Both versions have the same messages on the wire. grpcio-reflection contains only the older descriptors, so the list
# of services names only the older version.
SERVICES = (SERVICE_NAME, "grpc.reflection.v1.ServerReflection")


class Descriptors:
    """The descriptors of the process, for grpcio's servicer. They find methods too (grpc/grpc issue 34743)."""

    def __init__(self) -> None:
        self._pool = Default()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def FindFileContainingSymbol(self, symbol: str) -> FileDescriptor:  # noqa: N802 protobuf's name
        """The file that defines a message, an enum, a service or a method. Raises KeyError."""
        try:
            return self._pool.FindFileContainingSymbol(symbol)
        except KeyError:
            service, _, method = symbol.rpartition(".")
            return self._pool.FindServiceByName(service).methods_by_name[method].containing_service.file


def handlers(services: Sequence[str]) -> list[grpc.GenericRpcHandler]:
    """A handler for each version of reflection. services: full names; reflection itself is added."""
    servicer = reflection.ReflectionServicer([*services, SERVICE_NAME], pool=Descriptors())
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    return [grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": method}) for name in SERVICES]
