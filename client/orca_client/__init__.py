"""The Python client of Orca, for threads and for asyncio. A stream resumes by itself, over several addresses."""

from .aio import AsyncOrcaClient, AsyncStream
from .client import OrcaClient, Stream
from .errors import (
    Aborted,
    AlreadyExists,
    Cancelled,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    OrcaError,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
    Unreachable,
)
from .events import (
    Accepted,
    Engine,
    Event,
    Finished,
    FinishReason,
    Model,
    Prompt,
    PromptToken,
    Timings,
    Token,
    TopToken,
    message_of,
)
from .many import Answer, Message
from .tls import tls_credentials

__version__ = "0.1.0"

__all__ = [
    "Aborted",
    "Accepted",
    "AlreadyExists",
    "Answer",
    "AsyncOrcaClient",
    "AsyncStream",
    "Cancelled",
    "DataLoss",
    "DeadlineExceeded",
    "Engine",
    "Event",
    "FailedPrecondition",
    "FinishReason",
    "Finished",
    "Internal",
    "InvalidArgument",
    "Message",
    "Model",
    "NotFound",
    "OrcaClient",
    "OrcaError",
    "PermissionDenied",
    "Prompt",
    "PromptToken",
    "ResourceExhausted",
    "Stream",
    "Timings",
    "Token",
    "TopToken",
    "Unauthenticated",
    "Unavailable",
    "Unreachable",
    "__version__",
    "message_of",
    "tls_credentials",
]
