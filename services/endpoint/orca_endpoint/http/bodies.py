"""The bodies of HTTP requests: read within bounds of size and memory, parsed without holding up the loop."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from orca_common.errors import InvalidArgument, OrcaError, echo

from ..requests.limits import Held, Limits
from ..requests.threads import BODY_IN_LOOP, Threads
from .access import peer_of
from .errors import BodyTooLarge, EncodedBody, OtherBody, refused

T = TypeVar("T")

PLAIN, JSON = "identity", "application/json"  # the only content coding, and the only type
DRAINED_BODY = 8  # a body of up to this many times the limit is read and dropped, so that its client hears the refusal
# The parser of JSON lets no other thread run: 100 ns a value. More values than this are refused before it begins.
MAX_VALUES = 1 << 18


class Body:
    """The body of one request, which counts against the limits until it is released."""

    def __init__(self, raw: bytes, held: Held) -> None:
        self._raw, self.held = raw, held

    def take(self) -> bytes:
        """The bytes, once: no other object keeps them."""
        raw, self._raw = self._raw, b""
        return raw


class BodyMiddleware:
    """Reads the body of each request, within the limits, before the application sees the request. `body_in` has it."""

    def __init__(self, app: ASGIApp, limits: Limits, max_bytes: int) -> None:
        self._app, self._limits, self._max_bytes = app, limits, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._limits.call(peer_of(scope)), self._limits.body(peer_of(scope)) as held:
                scope["orca.body"] = Body(await self._read(Request(scope, receive), held), held)
                await self._app(scope, receive, send)
        except ClientDisconnect:
            pass
        except OrcaError as error:  # the application answers its own errors
            await refused(error)(scope, receive, send)

    async def _read(self, request: Request, held: Held) -> bytes:
        """The body. Raises BodyTooLarge, EncodedBody or OtherBody, but reads on first: a client that sends reads no
        answer."""
        parts, size = [], 0
        encoding = request.headers.get("content-encoding", PLAIN).strip().lower()
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        fine = encoding == PLAIN and (kind == JSON or request.method != "POST")
        async for part in request.stream():
            size += len(part)
            if size <= self._max_bytes and fine:
                held.add(len(part))
                parts.append(part)
            else:
                parts.clear()
                held.release()
            if size > self._max_bytes * DRAINED_BODY:
                break
        if encoding != PLAIN:
            problem = f"is {echo(encoding)!r}; bodies are taken as they are, without it or as {PLAIN}"
            raise EncodedBody("Content-Encoding", problem)
        if not fine and size:  # a page of another site may send other types without asking first
            is_ = f"is {echo(kind)!r}" if kind else "is missing"
            raise OtherBody("Content-Type", f"{is_}; send the header Content-Type: {JSON} with a body of JSON")
        if size > self._max_bytes:
            raise BodyTooLarge(f"body: more than {self._max_bytes} bytes; at most {self._max_bytes} are allowed")
        return b"".join(parts)


def body_in(scope: Mapping[str, Any]) -> Body:
    """The body of a request that the BodyMiddleware has read."""
    return scope["orca.body"]


async def parsed(body: Body, parse: Callable[[bytes], T], threads: Threads, caller: str) -> T:
    """Parses a body of JSON; a large one in a thread, in its caller's turn. Returns and raises what `parse` does."""
    raw = body.take()
    if len(raw) <= BODY_IN_LOOP:
        return parse(raw)

    def work() -> T:
        check_values(raw)
        return parse(raw)

    return await threads.run(work, caller)


def check_values(raw: bytes) -> None:
    """Raises InvalidArgument for a body with so many values that parsing it would hold up everybody.

    Counts commas outside of strings, and quotes: all of that is a few fast passes over the bytes.
    """
    plain = raw.replace(rb"\\", b"").replace(rb"\"", b"")
    if plain.count(b'"') <= 4 * MAX_VALUES:
        outside = b"".join(plain.split(b'"')[::2])
        if outside.count(b",") < MAX_VALUES:
            return
    raise InvalidArgument("body", f"has too many values; at most {MAX_VALUES} are allowed")
