"""Every error that a user or another process can cause, and its one table to gRPC.

OrcaError
├── InvalidArgument      bad input; names the field
├── FailedPrecondition   can never be done here: larger than every engine, another model, an old term
├── AlreadyExists        a known request id with another body
├── NotFound             unknown request
├── ResourceExhausted    queue full; says when to try again
├── DeadlineExceeded     the request's own deadline; never a shortened answer
├── Cancelled            the request was cancelled
├── Aborted              a newer call of the same request took over
├── DataLoss             the pool no longer holds what the client was shown
├── Unavailable          a dependency is away; try again
└── Internal             a bug, or a request that took its engine down again and again; carries the trace id
"""

import logging
import secrets
from typing import ClassVar, Never

import grpc
from google.protobuf import any_pb2
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status
from opentelemetry import trace
from opentelemetry.trace import format_trace_id

log = logging.getLogger(__name__)


class OrcaError(Exception):
    """An error with a gRPC status. `str(error)` is the sentence that the client reads."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.UNKNOWN

    def details(self) -> list[Message]:
        """The google.rpc messages that a program can read."""
        return []


class InvalidArgument(OrcaError):
    """`field` is the request's field as the caller wrote it, `problem` says what is wrong and the limit."""

    code = grpc.StatusCode.INVALID_ARGUMENT

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field, self.problem = field, problem

    def details(self) -> list[Message]:
        violation = error_details_pb2.BadRequest.FieldViolation(field=self.field, description=self.problem)
        return [error_details_pb2.BadRequest(field_violations=[violation])]


class FailedPrecondition(OrcaError):
    code = grpc.StatusCode.FAILED_PRECONDITION


class AlreadyExists(OrcaError):
    code = grpc.StatusCode.ALREADY_EXISTS


class NotFound(OrcaError):
    code = grpc.StatusCode.NOT_FOUND


class ResourceExhausted(OrcaError):
    """`retry_after` is in seconds."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after

    def details(self) -> list[Message]:
        delay = Duration()
        delay.FromMilliseconds(int(self.retry_after * 1000))
        return [error_details_pb2.RetryInfo(retry_delay=delay)]


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
    """`trace_id` leads to the request's trace and log lines; empty when there is none."""

    code = grpc.StatusCode.INTERNAL

    def __init__(self, message: str, trace_id: str = "") -> None:
        super().__init__(f"{message} (trace id {trace_id})" if trace_id else message)
        self.trace_id = trace_id


async def abort(context: grpc.aio.ServicerContext, error: OrcaError) -> Never:
    """Ends a call with the error's status, message and details."""
    packed = []
    for detail in error.details():
        packed.append(any_pb2.Any())
        packed[-1].Pack(detail)
    number = code_pb2.Code.Value(error.code.name)
    status = rpc_status.to_status(status_pb2.Status(code=number, message=str(error), details=packed))
    await context.abort(status.code, status.details, status.trailing_metadata)
    raise AssertionError("abort() raises")


def internal(error: Exception) -> Internal:
    """The answer to a bug: the log line and the client's sentence share a trace id."""
    context = trace.get_current_span().get_span_context()
    trace_id = format_trace_id(context.trace_id) if context.is_valid else secrets.token_hex(16)
    log.error("internal error", exc_info=error, extra={"trace": trace_id})
    return Internal("internal error", trace_id)
