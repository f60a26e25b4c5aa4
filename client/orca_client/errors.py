"""Every error that a call can end with: the server's tree (`orca_common.errors`) as the client sees it.

OrcaError
├── InvalidArgument      bad input; `field` names it
├── FailedPrecondition   the server can never do it: larger than every engine, no tokenizer
├── AlreadyExists        the request id is known with another body
├── NotFound             the request is unknown
├── ResourceExhausted    the queue is full; `retry_after` says when to try again, in seconds
├── DeadlineExceeded     the timeout of the request passed; an answer is never shortened instead
├── Cancelled            the request was cancelled, or this client closed its stream
├── Aborted              a newer call of the same request took over
├── Unauthenticated      no API key, or one that the server does not know
├── PermissionDenied     the certificate has another role than client
├── DataLoss             the stream cannot go on from the tokens that were shown
├── Unavailable          no endpoint answered for as long as the client was told to try
│   └── Unreachable      no endpoint could even be reached; the sentence says why: nothing listens, TLS, the name
└── Internal             a bug of the server; `trace_id` leads to its traces and logs

Each has `code`, the gRPC status, and `reason`, a word for programs. A status outside this tree (UNIMPLEMENTED,
OUT_OF_RANGE) is a plain OrcaError.
"""

from collections.abc import Iterable
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

M = TypeVar("M", bound=Message)

DETAILS = "grpc-status-details-bin"  # the metadata key of a google.rpc.Status

# A call ends with one of these when its connection, a proxy or the process at its other end dies: RST_STREAM becomes
# INTERNAL or CANCELLED, a stream without trailers UNKNOWN. Such an end has no DETAILS; every error that Orca sends has.
BROKEN = {grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN}

# The reasons that no server says.
TRANSPORT = "TRANSPORT"  # the connection broke, or what stands between ended the call
UNREACHABLE = "UNREACHABLE"
CLIENT_CLOSED = "CLIENT_CLOSED"


class OrcaError(Exception):
    """An error with a gRPC status. `str(error)` is the server's sentence.

    `reason` is the server's word for programs (orca.proto lists them). An error that is made here has the same word for
    the same thing, or TRANSPORT, UNREACHABLE, CLIENT_CLOSED. `answered`: an endpoint has ended the call with it; it was
    not made here, or by what stands between.
    """

    code: grpc.StatusCode = grpc.StatusCode.UNKNOWN
    reason: str = TRANSPORT
    answered: bool = False


class InvalidArgument(OrcaError):
    """`field` is the name of the request's field, or "" when the server named none."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "INVALID_FIELD"

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
    """`retry_after` is in seconds; None: trying again does not help (the message was above the transport's limit)."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DeadlineExceeded(OrcaError):
    code = grpc.StatusCode.DEADLINE_EXCEEDED
    reason = "DEADLINE_PASSED"


class Cancelled(OrcaError):
    code = grpc.StatusCode.CANCELLED
    reason = CLIENT_CLOSED


class Aborted(OrcaError):
    code = grpc.StatusCode.ABORTED


class Unauthenticated(OrcaError):
    code = grpc.StatusCode.UNAUTHENTICATED


class PermissionDenied(OrcaError):
    code = grpc.StatusCode.PERMISSION_DENIED


class DataLoss(OrcaError):
    code = grpc.StatusCode.DATA_LOSS
    reason = "TOKENS_LOST"


class Unavailable(OrcaError):
    code = grpc.StatusCode.UNAVAILABLE


class Unreachable(Unavailable):
    """None of the client's addresses could be reached. `sure`: the cause is known for each of them, and no guess."""

    reason = UNREACHABLE

    def __init__(self, message: str, sure: bool = True) -> None:
        super().__init__(message)
        self.sure = sure


class Internal(OrcaError):
    """`trace_id` is "" when the server named none."""

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
        Unauthenticated,
        PermissionDenied,
        DataLoss,
        Unavailable,
    )
}


def error_of(code: grpc.StatusCode, message: str | None, metadata: Iterable[tuple[str, Any]] | None) -> OrcaError:
    """The error of a call that ended with this status. A broken transport is Unavailable, whatever its code."""
    sentence = message or code.name
    raw = next((value for key, value in metadata or () if key == DETAILS), None)
    if raw is None and code in BROKEN:
        return Unavailable(f"the stream broke: {sentence}")
    status = _status(raw or b"")
    info = _detail(status, ErrorInfo)
    error = _error(code, sentence, status, info.metadata["trace_id"] if info and "trace_id" in info.metadata else "")
    error.answered = info is not None and bool(info.reason)
    error.reason = info.reason if info and info.reason else TRANSPORT
    return error


def _error(code: grpc.StatusCode, sentence: str, status: Status, trace_id: str) -> OrcaError:
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return InvalidArgument(sentence, _field(status))
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return ResourceExhausted(sentence, _retry_after(status))
    if code is grpc.StatusCode.INTERNAL:
        return Internal(sentence, trace_id)
    if code in _PLAIN:
        return _PLAIN[code](sentence)
    error = OrcaError(f"{sentence} ({code.name})")
    error.code = code
    return error


def _status(raw: bytes) -> Status:
    """Returns the status in a call's metadata. Broken bytes cost its details, not the error."""
    try:
        return Status.FromString(raw)
    except DecodeError:
        return Status()


def _field(status: Status) -> str:
    """The field that the request's error names, or ""."""
    bad_request = _detail(status, BadRequest)
    violations = bad_request.field_violations if bad_request is not None else ()
    return violations[0].field if violations else ""


def _retry_after(status: Status) -> float | None:
    """Seconds until the call may be tried again, or None."""
    retry_info = _detail(status, RetryInfo)
    if retry_info is None:
        return None
    delay = retry_info.retry_delay
    return max(0.0, delay.seconds + delay.nanos / 1e9)


def _detail(status: Status, kind: type[M]) -> M | None:
    """Returns the status's detail of this type; None when it is absent or broken."""
    detail = kind()
    try:
        return next((detail for packed in status.details if packed.Unpack(detail)), None)
    except DecodeError:
        return None
