"""Every error that a call can end with: the server's tree (`orca_common.errors`), seen from the client.

OrcaError
├── InvalidArgument      bad input; `field` names it
├── FailedPrecondition   can never be done there: larger than every engine, no tokenizer
├── AlreadyExists        the request id is known with another body
├── NotFound             unknown request
├── ResourceExhausted    the queue is full; `retry_after` says when to try again, in seconds
├── DeadlineExceeded     the timeout of the request; never a shortened answer
├── Cancelled            the request was cancelled, or its stream was closed here
├── Aborted              a newer call of the same request took over
├── DataLoss             the stream cannot go on from the tokens that were shown
├── Unavailable          no endpoint answered, for as long as the client was told to try
└── Internal             a bug of the server; `trace_id` leads to its traces and logs

Each has `code`, the gRPC status; a status outside this tree (UNAUTHENTICATED, UNIMPLEMENTED, ..) is a plain OrcaError.
"""

import re
from collections.abc import Iterable
from typing import Any

import grpc
from google.protobuf.any_pb2 import Any as Packed
from google.protobuf.duration_pb2 import Duration
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

DETAILS = "grpc-status-details-bin"

# What a call ends with when its connection, a proxy or the process at its other end dies: RST_STREAM becomes INTERNAL
# or CANCELLED, a stream without trailers UNKNOWN. Every error that Orca itself sends carries DETAILS; these do not.
TRANSPORT = {grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN}


class OrcaError(Exception):
    """An error with a gRPC status. `str(error)` is the server's sentence."""

    code: grpc.StatusCode = grpc.StatusCode.UNKNOWN


class InvalidArgument(OrcaError):
    """`field` is the request's field ("" when the server named none)."""

    code = grpc.StatusCode.INVALID_ARGUMENT

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class FailedPrecondition(OrcaError):
    code = grpc.StatusCode.FAILED_PRECONDITION


class AlreadyExists(OrcaError):
    code = grpc.StatusCode.ALREADY_EXISTS


class NotFound(OrcaError):
    code = grpc.StatusCode.NOT_FOUND


class ResourceExhausted(OrcaError):
    """`retry_after` is in seconds; None when trying again does not help (a message above the transport's limit)."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DeadlineExceeded(OrcaError):
    code = grpc.StatusCode.DEADLINE_EXCEEDED


class Cancelled(OrcaError):
    code = grpc.StatusCode.CANCELLED


class Aborted(OrcaError):
    code = grpc.StatusCode.ABORTED


class DataLoss(OrcaError):
    code = grpc.StatusCode.DATA_LOSS


class Unavailable(OrcaError):
    code = grpc.StatusCode.UNAVAILABLE


class Internal(OrcaError):
    """`trace_id` is "" when the server's sentence has none."""

    code = grpc.StatusCode.INTERNAL

    def __init__(self, message: str, trace_id: str = "") -> None:
        super().__init__(message)
        self.trace_id = trace_id


_PLAIN: dict[grpc.StatusCode, type[OrcaError]] = {
    kind.code: kind
    for kind in (
        FailedPrecondition,
        AlreadyExists,
        NotFound,
        DeadlineExceeded,
        Cancelled,
        Aborted,
        DataLoss,
        Unavailable,
    )
}


def error_of(code: grpc.StatusCode, message: str | None, metadata: Iterable[tuple[str, Any]] | None) -> OrcaError:
    """The error of a call that ended with this status. A broken transport is Unavailable, whatever its code."""
    sentence = message or code.name
    status = next((value for key, value in metadata or () if key == DETAILS), None)
    if code in TRANSPORT and status is None:
        return Unavailable(f"the stream broke: {sentence}")
    details = _details(status) if status is not None else {}
    match code:
        case grpc.StatusCode.INVALID_ARGUMENT:
            return InvalidArgument(sentence, _field(details.get("google.rpc.BadRequest")))
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return ResourceExhausted(sentence, _retry_after(details.get("google.rpc.RetryInfo")))
        case grpc.StatusCode.INTERNAL:
            trace = re.search(r"\(trace id (\w+)\)", sentence)
            return Internal(sentence, trace[1] if trace else "")
    if code in _PLAIN:
        return _PLAIN[code](sentence)
    error = OrcaError(f"{sentence} ({code.name})")
    error.code = code
    return error


# -- google.rpc.Status and its details. Their Python comes with googleapis-common-protos, which this library does not
# need for three fields: protobuf's own parser also gives the fields of a message whose type it does not know.


def _fields(raw: bytes, number: int) -> list[bytes]:
    """The values of one field (strings, bytes, messages) of a serialized message; none when it is broken."""
    try:
        fields = UnknownFieldSet(Empty.FromString(raw))
    except DecodeError:
        return []
    return [field.data for field in fields if field.field_number == number and isinstance(field.data, bytes)]


def _details(status: bytes) -> dict[str, bytes]:
    """google.rpc.Status.details (field 3): type name -> message."""
    details = {}
    for raw in _fields(status, 3):
        try:
            packed = Packed.FromString(raw)
        except DecodeError:
            continue
        details[packed.type_url.rpartition("/")[2]] = packed.value
    return details


def _field(bad_request: bytes | None) -> str:
    """google.rpc.BadRequest.field_violations[0].field."""
    violations = _fields(bad_request, 1) if bad_request else []
    names = _fields(violations[0], 1) if violations else []
    return names[0].decode(errors="replace") if names else ""


def _retry_after(retry_info: bytes | None) -> float | None:
    """google.rpc.RetryInfo.retry_delay, in seconds."""
    if retry_info is None:
        return None
    delays = _fields(retry_info, 1)
    try:
        delay = Duration.FromString(delays[0]) if delays else Duration()
    except DecodeError:
        return None
    return max(0.0, delay.seconds + delay.nanos / 1e9)
