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
    ResourceExhausted,
    Unavailable,
)
from .events import Accepted, Engine, Event, Finished, FinishReason, Model, Timings, Token, message_of

__all__ = [
    "Aborted",
    "Accepted",
    "AlreadyExists",
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
    "Model",
    "NotFound",
    "OrcaClient",
    "OrcaError",
    "ResourceExhausted",
    "Stream",
    "Timings",
    "Token",
    "Unavailable",
    "message_of",
]
