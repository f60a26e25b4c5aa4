"""One HTTP exchange of a call: a client that may leave, a deadline, an answer that is whole or a stream.

The deadline comes in the header `X-Request-Timeout`, in seconds. A client that closes its connection leaves its call.
"""

import asyncio
import json
import math
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from orca_common.errors import DeadlineExceeded, InvalidArgument, OrcaError, echo
from orca_common.statuses import internal

from ..calls.line import note_error
from .errors import failure, refused

T = TypeVar("T")

TIMEOUT_HEADER, COMMENTS_HEADER, IDS_HEADER = "X-Request-Timeout", "X-Stream-Comments", "X-Stream-Ids"
EVENT_ID = "Last-Event-ID"  # which a browser's EventSource sends
EVENTS = "text/event-stream; charset=utf-8"  # the kind of a stream of server-sent events
COMMENT = b": waiting\n\n"  # in them: clients read over it
AGAIN = 1000  # ms after which a client of a stream is to come again; as long as Retry-After of a 503
DEADLINE_SLACK = 2.0  # seconds
LONGEST = 1e9  # seconds that a client may ask for: three decades, which the messages can hold


class Exchange(ABC):
    """A method as an ASGI application. A Starlette endpoint would not notice that its client leaves."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = Answer(scope, receive, send)
        try:
            await while_connected(receive, self._serve(Request(scope, receive), answer))
        except ClientDisconnect:
            pass
        except OrcaError as error:
            await answer.fail(error)
        except Exception as error:
            await answer.fail(internal(error))

    @abstractmethod
    async def _serve(self, request: Request, answer: "Answer") -> None:
        """Answers. What it raises is answered as an error."""


def failed_event(error: OrcaError) -> bytes:
    """The event of an error that ends a stream, in the shape of an error's body."""
    return f"data: {json.dumps(failure(error)[2])}\n\n".encode()


class Answer:
    """One HTTP answer: a whole one, or a stream of server-sent events or of lines."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self.started = False
        self._failed = failed_event
        self._written = asyncio.get_running_loop().time()  # when the last part was

    async def start_stream(
        self, more: dict[str, str], failed: Callable[[OrcaError], bytes], kind: str = EVENTS
    ) -> None:
        """more: headers beside those of every stream. failed: makes the event of an error that ends it. kind: of the
        content."""
        self._failed = failed
        headers = [(b"content-type", kind.encode()), (b"cache-control", b"no-cache")]
        headers += [(name.lower().encode(), value.encode()) for name, value in more.items()]
        self.started = True
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def write(self, chunk: bytes) -> None:
        self._written = asyncio.get_running_loop().time()
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    @asynccontextmanager
    async def commented(self, silence: float, comment: Callable[[], bytes]) -> AsyncGenerator[None]:
        """Writes a comment whenever the stream was silent for `silence` seconds, until the block ends. 0: never."""
        commenting = asyncio.create_task(self._comment(silence, comment)) if silence else None
        try:
            yield
        finally:
            if commenting is not None:
                commenting.cancel()
                await asyncio.gather(commenting, return_exceptions=True)

    async def _comment(self, silence: float, comment: Callable[[], bytes]) -> None:
        while True:
            left = self._written + silence - asyncio.get_running_loop().time()
            if left > 0:
                await asyncio.sleep(left)
            elif self.started:
                await self.write(comment())
            else:  # a refusal may still have its own status
                await asyncio.sleep(silence)

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def whole(self, response: Response) -> None:
        """Sends a whole answer."""
        self.started = True
        await response(self._scope, self._receive, self._send)

    async def fail(self, error: OrcaError) -> None:
        """Sends the error as the answer, or as the last event of a stream that has begun (no [DONE] follows then)."""
        if self.started:
            note_error(error)
            await self.write(self._failed(error))
            await self.end()
        else:
            await self.whole(refused(error))

    async def ask_again(self, error: OrcaError, event: str) -> None:
        """Answers an EventSource by a stream without events. It comes again after one, and never after a 503.

        event: the id of the last one that it has seen. By WHATWG's letter it would forget it at the blank line.
        """
        note_error(error)
        await self.start_stream({}, failed_event)
        await self.write(f"id: {event}\nretry: {AGAIN}\n\n".encode())
        await self.end()


@asynccontextmanager
async def until(deadline: float | None) -> AsyncIterator[None]:
    """Raises DeadlineExceeded some time after the deadline, a moment of the loop's clock.

    The pool ends the request at its deadline. The slack lets the pool be first; this bound holds when the pool is away.
    (gRPC itself ends a call at its deadline.)
    """
    try:
        async with asyncio.timeout_at(None if deadline is None else deadline + DEADLINE_SLACK):
            yield
    except TimeoutError:
        raise DeadlineExceeded("the deadline that X-Request-Timeout set has passed") from None


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Runs work. When the client closes its connection first, cancels the work and raises ClientDisconnect."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.create_task(work), asyncio.create_task(gone())
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        await working
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
        del task, working, leaving  # a task holds its error, whose traceback holds this frame


def deadline_of(request: Request) -> float | None:
    """The deadline that the timeout header asks for, as a moment of the loop's clock."""
    given = request.headers.get(TIMEOUT_HEADER)
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= LONGEST:  # NaN is not between them either
        must = f"must be a number of seconds above 0, at most {LONGEST:g}"
        raise InvalidArgument(TIMEOUT_HEADER, f"{must}; it is {echo(given)!r}")
    return asyncio.get_running_loop().time() + seconds


def silence_of(request: Request, seconds: float) -> float:
    """The seconds of silence after which the request's stream gets a comment: as set, or 0 where it wants none."""
    return seconds if on_or_off(request, COMMENTS_HEADER, True) else 0.0


def ids_in(request: Request) -> bool | None:
    """Whether the request asks that the events of its stream have ids, or shows that its client knows them. None: it
    does not say. Others' readers of streams do not expect them."""
    return on_or_off(request, IDS_HEADER, True if EVENT_ID in request.headers else None)


def on_or_off(request: Request, header: str, absent: T) -> bool | T:
    given = request.headers.get(header)
    if given not in ("on", "off", None):
        raise InvalidArgument(header, f"must be on or off; it is {echo(given)!r}")
    return absent if given is None else given == "on"
