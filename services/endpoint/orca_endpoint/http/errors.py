"""Errors as HTTP answers: status, headers, and a body in OpenAI's shape."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from orca_common.errors import (
    ErrorReason,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    OrcaError,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
)

from ..calls.line import note_error

# HTTP status and OpenAI's error type of each error, by its gRPC status.
STATUS: Mapping[str, tuple[int, str]] = {
    "INVALID_ARGUMENT": (400, "invalid_request_error"),
    "FAILED_PRECONDITION": (400, "invalid_request_error"),
    "UNAUTHENTICATED": (401, "invalid_request_error"),
    "PERMISSION_DENIED": (403, "invalid_request_error"),
    "NOT_FOUND": (404, "invalid_request_error"),
    "ALREADY_EXISTS": (409, "invalid_request_error"),
    "ABORTED": (409, "invalid_request_error"),
    "RESOURCE_EXHAUSTED": (429, "rate_limit_error"),
    "CANCELLED": (499, "cancelled"),
    "INTERNAL": (500, "server_error"),
    "DATA_LOSS": (500, "server_error"),
    "UNAVAILABLE": (503, "server_error"),
    "DEADLINE_EXCEEDED": (504, "timeout"),
}

MESSAGES, OLLAMA = "/v1/messages", "/api/"  # where Anthropic's API begins, and where Ollama's
# Anthropic's error types by their HTTP status, where they are others than for all of 4xx or 5xx.
KINDS: Mapping[int, str] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
}


class UnsupportedBody(InvalidArgument):
    """The body is of a kind that is not taken: HTTP status 415. `takes`: the header that says which kind is."""

    takes: Mapping[str, str]


class EncodedBody(UnsupportedBody):
    """The body is compressed."""

    takes: Mapping[str, str] = {"Accept-Encoding": "identity"}  # RFC 9110, section 12.5.3: what a request may have


class OtherBody(UnsupportedBody):
    """The body is not said to be JSON."""

    takes: Mapping[str, str] = {"Accept": "application/json"}  # section 12.5.1


class OtherHost(InvalidArgument):
    """The request is for another host: HTTP status 421."""


class BodyTooLarge(OrcaError):
    """The body exceeds the limit: HTTP status 413."""


class Refusal(JSONResponse):
    """The answer of an error, in the shape of the API that its path belongs to."""

    def __init__(self, error: OrcaError, status: int | None = None, headers: Mapping[str, str] | None = None) -> None:
        """status, headers: other ones than those of the error."""
        own_status, own_headers, body = failure(error)
        self._error = error
        super().__init__(body, status or own_status, own_headers if headers is None else headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        for beginning, shaped in ((MESSAGES, in_messages), (OLLAMA, in_lines)):
            if scope.get("path", "").startswith(beginning):
                self.body = self.render(shaped(self._error))
                self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


def refused(error: OrcaError, status: int | None = None, headers: Mapping[str, str] | None = None) -> Refusal:
    """Makes the HTTP answer of an error, and notes the error in the call's line of the log."""
    note_error(error)
    return Refusal(error, status, headers)


def in_messages(error: OrcaError) -> dict[str, Any]:
    """The body of an error in Anthropic's shape."""
    status, _, body = failure(error)
    described = body["error"]
    kind = KINDS.get(status, "api_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": described["message"]}}


def in_lines(error: OrcaError) -> dict[str, Any]:
    """The body of an error in Ollama's shape."""
    return {"error": failure(error)[2]["error"]["message"]}


def failure(error: OrcaError) -> tuple[int, dict[str, str], dict[str, Any]]:
    """HTTP status, headers and body of an error."""
    status, kind = STATUS.get(error.code, (500, "server_error"))
    headers: dict[str, str] = {}
    code = param = None
    match error:
        case UnsupportedBody():
            status, param = 415, error.field
            headers |= error.takes
        case OtherHost():
            status, param = 421, error.field
        case InvalidArgument() | FailedPrecondition():
            param = error.field
        case NotFound(reason=ErrorReason.UNKNOWN_MODEL):
            param, code = "model", "model_not_found"
        case Unauthenticated():
            code, headers["WWW-Authenticate"] = "invalid_api_key", "Bearer"
        case BodyTooLarge():
            status, kind = 413, "invalid_request_error"
        case ResourceExhausted():
            headers["Retry-After"] = str(max(1, round(error.retry_after)))
        case Unavailable():
            headers["Retry-After"] = "1"
    return status, headers, {"error": {"message": str(error), "type": kind, "param": param, "code": code}}
