"""The one table from errors to statuses of gRPC, and the error that answers a bug."""

import logging
import secrets
from typing import Never

import grpc
from google.protobuf import any_pb2
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status
from opentelemetry import trace
from opentelemetry.trace import format_trace_id

from .errors import Internal, InvalidArgument, OrcaError, ResourceExhausted

log = logging.getLogger(__name__)

DOMAIN = "orca.serving"  # of the reasons, in google.rpc.ErrorInfo


def details_of(error: OrcaError) -> list[Message]:
    """The google.rpc messages of an error that a program can read."""
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)
    match error:
        case InvalidArgument():
            violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.problem)
            return [info, error_details_pb2.BadRequest(field_violations=[violation])]
        case ResourceExhausted():
            delay = Duration()
            delay.FromMilliseconds(int(error.retry_after * 1000))
            return [info, error_details_pb2.RetryInfo(retry_delay=delay)]
        case Internal() if error.trace_id:
            info.metadata["trace_id"] = error.trace_id
        case _:
            pass
    return [info]


def status_of(error: OrcaError) -> status_pb2.Status:
    """The error's status, sentence and details as one message."""
    packed = []
    for detail in details_of(error):
        packed.append(any_pb2.Any())
        packed[-1].Pack(detail)
    return status_pb2.Status(code=code_pb2.Code.Value(error.code), message=str(error), details=packed)


async def abort(context: grpc.aio.ServicerContext, error: OrcaError) -> Never:
    """Ends a call of gRPC's own server with the error's status."""
    status = rpc_status.to_status(status_of(error))
    await context.abort(status.code, status.details, status.trailing_metadata)
    raise AssertionError("abort() raises")


def internal(error: Exception) -> Internal:
    """The answer to a bug: the log line and the client's sentence share a trace id."""
    context = trace.get_current_span().get_span_context()
    trace_id = format_trace_id(context.trace_id) if context.is_valid else secrets.token_hex(16)
    log.error("internal error", exc_info=error, extra={"trace": trace_id})
    return Internal("internal error", trace_id)
