"""Every error that a user or another process can cause. `statuses` makes statuses of gRPC of them.

OrcaError
├── InvalidArgument      bad input; names the field
├── FailedPrecondition   can never be done here: larger than every engine, another model, an old term
├── AlreadyExists        a known request id with another body
├── NotFound             unknown request
├── ResourceExhausted    queue full, or too long for a deadline; says when to try again
├── DeadlineExceeded     the request's own deadline; never a shortened answer
├── Cancelled            the request was cancelled
├── Aborted              a newer call of the same request took over, or its model is gone: begin a new request
├── Unauthenticated      no API key, or a wrong one
├── PermissionDenied     a certificate whose role may not do this
├── DataLoss             the pool no longer holds what the client was shown
├── Unimplemented        no such method, or a compression that is not known
├── Unavailable          a dependency is away; try again
└── Internal             a bug, or a request that took its engine down again and again; carries the trace id

Nothing of gRPC is imported here: the processes that follow forms, compile them and render chats are started anew while
streams wait, and its import takes longer than all else of their start.
"""

from enum import StrEnum
from typing import ClassVar

ECHO = 200  # characters of what a caller wrote that an error shows
SENTENCE = 600  # characters of an error


def echo(text: str, limit: int = ECHO) -> str:
    """Returns a caller's text, cut to the length that an error may show."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


class ErrorReason(StrEnum):
    """The exact error, for programs: names that stay. orca.proto says which method ends with which of them."""

    UNSPECIFIED = "UNSPECIFIED"  # only errors that no client of the doors gets
    INVALID_FIELD = "INVALID_FIELD"
    UNREADABLE_MESSAGE = "UNREADABLE_MESSAGE"
    NO_TOKENIZER = "NO_TOKENIZER"
    NO_CHAT_TEMPLATE = "NO_CHAT_TEMPLATE"
    TOO_LARGE = "TOO_LARGE"
    UNKNOWN_REQUEST = "UNKNOWN_REQUEST"
    UNKNOWN_MODEL = "UNKNOWN_MODEL"
    REQUEST_ID_IN_USE = "REQUEST_ID_IN_USE"
    QUEUE_FULL = "QUEUE_FULL"
    QUEUE_LONG = "QUEUE_LONG"
    TENANT_FULL = "TENANT_FULL"
    ENDPOINT_FULL = "ENDPOINT_FULL"
    TAKEN_OVER = "TAKEN_OVER"
    MODEL_CHANGED = "MODEL_CHANGED"
    REQUEST_CANCELLED = "REQUEST_CANCELLED"
    CLIENT_LEFT = "CLIENT_LEFT"
    DEADLINE_PASSED = "DEADLINE_PASSED"
    TOKENS_LOST = "TOKENS_LOST"
    NO_KEY = "NO_KEY"
    WRONG_KEY = "WRONG_KEY"
    WRONG_ROLE = "WRONG_ROLE"
    POOL_AWAY = "POOL_AWAY"
    NO_ENGINE = "NO_ENGINE"
    ENDPOINT_LEAVING = "ENDPOINT_LEAVING"
    NO_COMPILER = "NO_COMPILER"
    NO_RENDERER = "NO_RENDERER"
    ENGINES_LOST = "ENGINES_LOST"
    LOGITS_NOT_FINITE = "LOGITS_NOT_FINITE"
    NO_FORMS = "NO_FORMS"
    NO_TOOLS = "NO_TOOLS"
    FORM_STUCK = "FORM_STUCK"
    AMBIGUOUS_CALL = "AMBIGUOUS_CALL"
    UNKNOWN_PARAMETER = "UNKNOWN_PARAMETER"
    UNSUPPORTED = "UNSUPPORTED"
    BUG = "BUG"


class OrcaError(Exception):
    """An error with a gRPC status. `str(error)` is the sentence that the client reads, `reason` the program's word."""

    code: ClassVar[str] = "UNKNOWN"  # the name of its status
    reason: ErrorReason = ErrorReason.UNSPECIFIED  # of all errors of a class, unless an error is given its own

    def __init__(self, message: str = "", *, reason: ErrorReason | None = None) -> None:
        super().__init__(echo(message, SENTENCE))
        if reason is not None:
            self.reason = reason


class InvalidArgument(OrcaError):
    """`field` is the request's field as the caller wrote it, `problem` says what is wrong and the limit."""

    code = "INVALID_ARGUMENT"
    reason = ErrorReason.INVALID_FIELD

    def __init__(self, field: str, problem: str, *, reason: ErrorReason | None = None) -> None:
        self.field, self.problem = echo(field), echo(problem, SENTENCE)
        super().__init__(f"{self.field}: {self.problem}", reason=reason)


class FailedPrecondition(OrcaError):
    """`field` is the request's field that cannot be honoured here, where it is one alone; the sentence names it."""

    code = "FAILED_PRECONDITION"

    def __init__(self, message: str, field: str | None = None, *, reason: ErrorReason | None = None) -> None:
        super().__init__(message, reason=reason)
        self.field = field


class AlreadyExists(OrcaError):
    code = "ALREADY_EXISTS"
    reason = ErrorReason.REQUEST_ID_IN_USE


class NotFound(OrcaError):
    code = "NOT_FOUND"
    reason = ErrorReason.UNKNOWN_REQUEST


class ResourceExhausted(OrcaError):
    """`retry_after` is in seconds."""

    code = "RESOURCE_EXHAUSTED"
    reason = ErrorReason.QUEUE_FULL

    def __init__(self, message: str, retry_after: float, *, reason: ErrorReason | None = None) -> None:
        super().__init__(message, reason=reason)
        self.retry_after = retry_after


class DeadlineExceeded(OrcaError):
    code = "DEADLINE_EXCEEDED"
    reason = ErrorReason.DEADLINE_PASSED


class Cancelled(OrcaError):
    code = "CANCELLED"
    reason = ErrorReason.REQUEST_CANCELLED


class Aborted(OrcaError):
    code = "ABORTED"
    reason = ErrorReason.TAKEN_OVER


class Unauthenticated(OrcaError):
    code = "UNAUTHENTICATED"
    reason = ErrorReason.WRONG_KEY


class PermissionDenied(OrcaError):
    code = "PERMISSION_DENIED"
    reason = ErrorReason.WRONG_ROLE


class DataLoss(OrcaError):
    code = "DATA_LOSS"
    reason = ErrorReason.TOKENS_LOST


class Unavailable(OrcaError):
    code = "UNAVAILABLE"


class Unimplemented(OrcaError):
    code = "UNIMPLEMENTED"
    reason = ErrorReason.UNSUPPORTED


class Internal(OrcaError):
    """`trace_id` leads to the request's trace and log lines; empty when there is none."""

    code = "INTERNAL"
    reason = ErrorReason.BUG

    def __init__(self, message: str, trace_id: str = "", *, reason: ErrorReason | None = None) -> None:
        super().__init__(f"{message} (trace id {trace_id})" if trace_id else message, reason=reason)
        self.trace_id = trace_id


def unreadable(problem: str) -> InvalidArgument:
    """The error of a gRPC message that cannot be read."""
    return InvalidArgument("message", problem, reason=ErrorReason.UNREADABLE_MESSAGE)


def reason_of(error: Exception) -> str:
    """An error as a sentence, for logs and other processes. Ours are sentences already."""
    return str(error) if isinstance(error, OrcaError) else f"{type(error).__name__}: {error}"
