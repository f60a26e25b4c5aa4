"""OpenAI's answers: from events and errors to JSON, whole or as server-sent events."""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from orca_common.errors import (
    ErrorReason,
    InvalidArgument,
    NotFound,
    OrcaError,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
)
from orca_pool.records import Reason

from .events import Finished, Token

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


class BodyTooLarge(OrcaError):
    """The body exceeds the limit: HTTP status 413."""


def finish_reason(reason: Reason) -> str:
    return "length" if reason is Reason.LENGTH else "stop"


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


class Choice:
    """The answer to one prompt, as it grows."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.tokens: list[Token] = []
        self.offset = 0  # characters given out
        self.input_tokens = self.output_tokens = 0
        self.finish: str | None = None


class Chunks:
    """Turns events into server-sent events. Constant parts are made once, so a chunk costs one small json.dumps."""

    def __init__(self, request_id: str, model: str, include_usage: bool, logprobs: bool) -> None:
        head = {"id": request_id, "object": "text_completion", "created": int(time.time()), "model": model}
        self._head = json.dumps(head)[:-1]
        self._usage = ',"usage":null' if include_usage else ""
        self._logprobs = logprobs

    def tokens(self, n: int, choice: Choice, tokens: Sequence[Token]) -> bytes:
        """The chunk of tokens that are there together; empty when they have nothing to show."""
        text = "".join([token.text for token in tokens])
        if not text and not (self._logprobs and tokens):
            return b""
        logprobs = json.dumps(logprobs_of(tokens, choice.offset)) if self._logprobs else "null"
        choice.offset += len(text)
        return self._chunk(n, text, logprobs, "null")

    def finished(self, n: int, event: Finished) -> bytes:
        return self._chunk(n, event.text, "null", json.dumps(finish_reason(event.reason)))

    def usage(self, prompt_tokens: int, completion_tokens: int) -> bytes:
        counts = json.dumps(usage(prompt_tokens, completion_tokens))
        return f'data: {self._head},"choices":[],"usage":{counts}}}\n\n'.encode()

    def _chunk(self, n: int, text: str, logprobs: str, reason: str) -> bytes:
        choice = f'{{"index":{n},"text":{json.dumps(text)},"logprobs":{logprobs},"finish_reason":{reason}}}'
        return f'data: {self._head},"choices":[{choice}]{self._usage}}}\n\n'.encode()


def completion(request_id: str, model: str, choices: list[Choice], logprobs: bool) -> dict[str, Any]:
    """The whole answer of a request that does not stream."""
    return {
        "id": request_id,
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [
            {
                "index": n,
                "text": "".join(choice.texts),
                "logprobs": logprobs_of(choice.tokens, 0) if logprobs else None,
                "finish_reason": choice.finish,
            }
            for n, choice in enumerate(choices)
        ],
        "usage": usage(sum(c.input_tokens for c in choices), sum(c.output_tokens for c in choices)),
    }


def logprobs_of(tokens: Sequence[Token], offset: int) -> dict[str, Any]:
    """OpenAI's logprobs of tokens whose text begins at `offset`. `top_logprobs` is null: the model's other choices are
    not known here."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": None,
        "text_offset": offsets,
    }


def failure(error: OrcaError) -> tuple[int, dict[str, str], dict[str, Any]]:
    """HTTP status, headers and body of an error."""
    status, kind = STATUS.get(error.code.name, (500, "server_error"))
    headers, code, param = {}, None, None
    match error:
        case InvalidArgument():
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
