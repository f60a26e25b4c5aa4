"""gRPC reflection, v1 and v1alpha: tools such as grpcurl ask the server for its contract.

The servicer of grpcio-reflection speaks v1alpha alone, finds no methods (grpc/grpc issue 34743), and ends INTERNAL on
bytes that are no request. This one takes its messages, and the descriptors of the process.
"""

from collections.abc import Callable, Sequence
from typing import Any

import grpc
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import Default, DescriptorPool
from google.protobuf.message import DecodeError
from grpc_reflection.v1alpha.reflection_pb2 import (
    DESCRIPTOR,
    ErrorResponse,
    ExtensionNumberResponse,
    FileDescriptorResponse,
    ListServiceResponse,
    ServerReflectionRequest,
    ServerReflectionResponse,
    ServiceResponse,
)

from orca_common.errors import ErrorReason, InvalidArgument
from orca_common.grpc_call import GrpcCall, Methods

from .limits import Limits
from .messages import Messages

SERVICES = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")


class Reflection:
    """Answers what a client asks about the services of a server."""

    def __init__(self, services: Sequence[str], messages: Messages, limits: Limits) -> None:
        """services: full names. Those of reflection itself are added."""
        self._messages, self._limits = messages, limits
        self._services = sorted({*services, *SERVICES})
        self._pools = (Default(), reflection_v1())

    def methods(self) -> Methods:
        """One for each version. The messages of both are the same on the wire."""
        return {f"/{name}/ServerReflectionInfo": self.info for name in SERVICES}

    async def info(self, call: GrpcCall) -> None:
        """ServerReflectionInfo. Raises InvalidArgument for bytes that are no request."""
        with self._limits.call(call.peer):
            while (raw := await self._messages.next(call)) is not None:
                try:
                    request = ServerReflectionRequest.FromString(raw)
                except DecodeError:
                    problem = "not a valid request of ServerReflectionInfo (text fields must be UTF-8)"
                    raise InvalidArgument("message", problem, reason=ErrorReason.UNREADABLE_MESSAGE) from None
                await call.write(self.answer(request).SerializeToString())

    def answer(self, request: ServerReflectionRequest) -> ServerReflectionResponse:
        """The answer to one question. What is not known is an answer too."""
        response = ServerReflectionResponse(valid_host=request.host, original_request=request)
        kind = request.WhichOneof("message_request")
        try:
            match kind:
                case "list_services":
                    services = [ServiceResponse(name=name) for name in self._services]
                    response.list_services_response.CopyFrom(ListServiceResponse(service=services))
                case "file_by_filename":
                    self._tell(response, self._find(lambda pool: pool.FindFileByName(request.file_by_filename)))
                case "file_containing_symbol":
                    self._tell(response, self._find(lambda pool: file_of(pool, request.file_containing_symbol)))
                case "file_containing_extension":
                    wanted = request.file_containing_extension
                    self._tell(
                        response,
                        self._find(lambda pool: extended(pool, wanted.containing_type, wanted.extension_number)),
                    )
                case "all_extension_numbers_of_type":
                    name = request.all_extension_numbers_of_type
                    numbers = self._find(lambda pool: extensions(pool, name))
                    response.all_extension_numbers_response.CopyFrom(
                        ExtensionNumberResponse(base_type_name=name, extension_number=numbers)
                    )
                case None:
                    refuse(response, grpc.StatusCode.INVALID_ARGUMENT, "message_request: is missing")
        except KeyError:
            refuse(response, grpc.StatusCode.NOT_FOUND, f"{kind}: not known here")
        return response

    def _find(self, look: Callable[[DescriptorPool], Any]) -> Any:
        """What the first pool that knows it says. Raises KeyError."""
        for pool in self._pools:
            try:
                return look(pool)
            except KeyError:
                pass
        raise KeyError

    def _tell(self, response: ServerReflectionResponse, file: FileDescriptor) -> None:
        """Adds a file and all that it imports."""
        files: dict[str, bytes] = {}
        add(file, files)
        response.file_descriptor_response.CopyFrom(FileDescriptorResponse(file_descriptor_proto=files.values()))


def file_of(pool: DescriptorPool, symbol: str) -> FileDescriptor:
    """The file that defines a message, an enum, a service or a method. Raises KeyError."""
    try:
        return pool.FindFileContainingSymbol(symbol)
    except KeyError:
        service, _, method = symbol.rpartition(".")
        return pool.FindServiceByName(service).methods_by_name[method].containing_service.file


def extended(pool: DescriptorPool, message: str, number: int) -> FileDescriptor:
    """The file that defines an extension. Raises KeyError."""
    extension = pool.FindExtensionByNumber(pool.FindMessageTypeByName(message), number)
    return pool.FindFileContainingSymbol(extension.full_name)


def extensions(pool: DescriptorPool, message: str) -> list[int]:
    """The numbers of a message's known extensions. Raises KeyError for an unknown message."""
    return sorted(extension.number for extension in pool.FindAllExtensions(pool.FindMessageTypeByName(message)))


def add(file: FileDescriptor, files: dict[str, bytes]) -> None:
    if file.name not in files:
        files[file.name] = file.serialized_pb
        for imported in file.dependencies:
            add(imported, files)


def refuse(response: ServerReflectionResponse, code: grpc.StatusCode, sentence: str) -> None:
    number: int = code.value[0]  # pyright: ignore[reportIndexIssue]
    response.error_response.CopyFrom(ErrorResponse(error_code=number, error_message=sentence))


def reflection_v1() -> DescriptorPool:
    """The descriptor of reflection v1, which is v1alpha's under another package."""
    text = FileDescriptorProto.FromString(DESCRIPTOR.serialized_pb)
    text.name = "grpc/reflection/v1/reflection.proto"
    text.package = "grpc.reflection.v1"
    for message in text.message_type:
        for field in (field for field in message.field if field.HasField("type_name")):
            field.type_name = field.type_name.replace(".v1alpha.", ".v1.")
    for service in text.service:
        for method in service.method:
            method.input_type = method.input_type.replace(".v1alpha.", ".v1.")
            method.output_type = method.output_type.replace(".v1alpha.", ".v1.")
    pool = DescriptorPool()
    pool.AddSerializedFile(text.SerializeToString())
    return pool
