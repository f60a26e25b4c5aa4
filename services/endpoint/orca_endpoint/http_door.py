"""The HTTP door: OpenAI's completions API over the same calls as the gRPC door.

A deadline comes in the header `X-Request-Timeout`, in seconds. A client that closes its connection ends its requests.
"""

import asyncio
import contextlib
import json
import logging
import math
import secrets
import socket
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from orca_common.errors import Cancelled, DeadlineExceeded, InvalidArgument, NotFound, OrcaError, Unavailable
from orca_pool.records import Reason

from .call import AcceptedEvent, Call, Event, FinishedEvent, TokenEvent
from .completion_answer import BodyTooLarge, Choice, Chunks, completion, failure, finish_reason
from .completion_request import Completion, ModelNotFound, parse
from .endpoint import Endpoint
from .failures import internal

log = logging.getLogger(__name__)

TIMEOUT_HEADER = "x-request-timeout"
STOP_SECONDS = 3  # for answers under way when the server ends
DRAINED_BODY = 8  # times the body's limit are read and dropped, so that the client hears the refusal
DEADLINE_SLACK = 2.0  # seconds
AHEAD = 64  # events that the calls of one request may be ahead of its client


class HttpDoor:
    """The HTTP server on the service's event loop."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._socket: socket.socket | None = None
        self._served: asyncio.Event | None = None
        routes = [
            Route("/v1/completions", Completions(endpoint), methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/v1/models/{id:path}", self._model),
        ]
        app = Starlette(routes=routes, exception_handlers={HTTPException: refused, OrcaError: failed})
        config = uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=STOP_SECONDS,
        )
        self._server = Server(config)
        self._created = int(time.time())

    async def start(self, host: str, port: int) -> int:
        """The port. Raises Unavailable when it cannot be had."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host, port), family=family, backlog=1024)
        except OSError as error:
            raise Unavailable(f"http_port: {host}:{port} cannot be listened on ({error})") from None
        return self._socket.getsockname()[1]

    async def serve(self) -> None:
        """Until `stop`."""
        assert self._socket is not None
        self._served = asyncio.Event()
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            self._served.set()

    async def stop(self) -> None:
        """Accepts nothing more and waits some seconds for the answers under way."""
        self._server.should_exit = True
        if self._served is not None:
            await self._served.wait()
        if self._socket is not None:
            self._socket.close()

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def _model(self, request: Request) -> Response:
        wanted = request.path_params["id"]
        if wanted != self._endpoint.name:
            raise ModelNotFound(f"model: {wanted!r} is not served here; {self._endpoint.name!r} is")
        return JSONResponse(self._card())

    def _card(self) -> dict[str, Any]:
        return {
            "id": self._endpoint.name,
            "object": "model",
            "created": self._created,
            "owned_by": "orca",
            "max_model_len": self._endpoint.checkpoint.max_positions,
        }


class Completions:
    """`POST /v1/completions`, as an ASGI application: it must hear when its client leaves."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        answer = Answer(send)
        try:
            raw = await self._body(request)
            await while_connected(receive, self._serve(raw, request, answer))
        except ClientDisconnect:
            pass
        except OrcaError as error:
            await answer.fail(error)
        except Exception as error:
            await answer.fail(internal(error))

    async def _serve(self, raw: bytes, request: Request, answer: "Answer") -> None:
        endpoint = self._endpoint
        deadline, carrier = deadline_of(request), dict(request.headers)
        wanted = parse(raw, endpoint.name, endpoint.settings.max_prompts)
        name = f"cmpl-{secrets.token_hex(12)}"
        calls = []
        for n, prompt in enumerate(wanted.prompts):
            prompt.request.request_id = name if len(wanted.prompts) == 1 else f"{name}-{n}"
            calls.append(await endpoint.generate(prompt.request, deadline, carrier, prompt.names))
        opened = Single(calls[0]) if len(calls) == 1 else Merged(calls)
        async with opened as events, until(deadline):
            choices = [Choice() for _ in calls]
            if wanted.stream:
                await self._stream(events, choices, wanted, name, answer)
            else:
                await self._whole(events, choices, wanted, name, answer)

    async def _stream(
        self, events: "Numbered", choices: list[Choice], wanted: Completion, name: str, answer: "Answer"
    ) -> None:
        """Headers with the first event, so that a refusal has its own status; then a chunk for each token with text."""
        chunks = Chunks(name, self._endpoint.name, wanted.include_usage, wanted.logprobs)
        async for n, event in events:
            if not answer.started:
                await answer.start_stream()
            if type(event) is TokenEvent:
                chunk = chunks.token(n, choices[n], event)
                if chunk:
                    await answer.write(chunk)
            elif isinstance(event, AcceptedEvent):
                choices[n].input_tokens = event.input_tokens
            elif isinstance(event, FinishedEvent):
                whole(event, name)
                choices[n].output_tokens = event.output_tokens
                await answer.write(chunks.finished(n, event))
        if wanted.include_usage:
            await answer.write(
                chunks.usage(sum(c.input_tokens for c in choices), sum(c.output_tokens for c in choices))
            )
        await answer.write(b"data: [DONE]\n\n")
        await answer.end()

    async def _whole(
        self, events: "Numbered", choices: list[Choice], wanted: Completion, name: str, answer: "Answer"
    ) -> None:
        async for n, event in events:
            choice = choices[n]
            if isinstance(event, TokenEvent):
                choice.pieces.append(event.text)
                if wanted.logprobs:
                    choice.tokens.append(event)
            elif isinstance(event, AcceptedEvent):
                choice.input_tokens = event.input_tokens
            else:
                whole(event, name)
                choice.pieces.append(event.text)
                choice.output_tokens, choice.finish = event.output_tokens, finish_reason(event.reason)
        await answer.json(200, {}, completion(name, self._endpoint.name, choices, wanted.logprobs))

    async def _body(self, request: Request) -> bytes:
        """Raises BodyTooLarge, when the body has been read: a client that still sends would not hear it."""
        limit = self._endpoint.settings.max_message_bytes
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size <= limit:
                parts.append(part)
            else:
                parts.clear()
            if size > limit * DRAINED_BODY:
                break
        if size > limit:
            raise BodyTooLarge(f"body: more than {limit} bytes; at most {limit} are allowed")
        return b"".join(parts)


Numbered = AsyncIterator[tuple[int, Event]]


@asynccontextmanager
async def until(deadline: float | None) -> AsyncIterator[None]:
    """gRPC ends a call at its deadline by itself; here it is done some time after the pool should have done it."""
    try:
        async with asyncio.timeout_at(None if deadline is None else deadline + DEADLINE_SLACK):
            yield
    except TimeoutError:
        raise DeadlineExceeded("the deadline has passed") from None


class Single:
    """The events of one call."""

    def __init__(self, call: Call) -> None:
        self._call = call

    async def __aenter__(self) -> Numbered:
        await self._call.__aenter__()
        return ((0, event) async for event in self._call.events())

    async def __aexit__(self, *error: Any) -> None:
        await self._call.__aexit__(*error)


class Merged:
    """The events of several calls as they come, each with its call's number. A slow reader slows the calls down."""

    def __init__(self, calls: list[Call]) -> None:
        self._calls = calls
        self._queue: asyncio.Queue[tuple[int, Event | Exception | None]] = asyncio.Queue(AHEAD)
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Numbered:
        self._tasks = [asyncio.create_task(self._pump(n, call)) for n, call in enumerate(self._calls)]
        return self._events()

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _pump(self, n: int, call: Call) -> None:
        try:
            async with call:
                async for event in call.events():
                    await self._queue.put((n, event))
            await self._queue.put((n, None))
        except Exception as error:
            await self._queue.put((n, error))

    async def _events(self) -> Numbered:
        left = len(self._calls)
        while left:
            n, event = await self._queue.get()
            if event is None:
                left -= 1
            elif isinstance(event, Exception):
                raise event  # the others end as if their client had left
            else:
                yield n, event


class Answer:
    """One HTTP answer: whole, or a stream of server-sent events."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False

    async def start_stream(self) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        self.started = True
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def write(self, chunk: bytes) -> None:
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def json(self, status: int, headers: dict[str, str], body: Any) -> None:
        raw = json.dumps(body).encode()
        pairs = {"content-type": "application/json", "content-length": str(len(raw)), **headers}
        encoded = [(name.lower().encode(), value.encode()) for name, value in pairs.items()]
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": encoded})
        await self._send({"type": "http.response.body", "body": raw, "more_body": False})

    async def fail(self, error: OrcaError) -> None:
        """The error as the answer, or as the last event of a stream that has begun (then no [DONE] follows)."""
        status, headers, body = failure(error)
        if self.started:
            await self.write(f"data: {json.dumps(body)}\n\n".encode())
            await self.end()
        else:
            await self.json(status, headers, body)


class Server(uvicorn.Server):
    """uvicorn without its signal handlers: signals are the service's."""

    def capture_signals(self) -> Any:
        return contextlib.nullcontext()


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Runs work, and cancels it when the client closes its connection."""

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


def whole(event: FinishedEvent, name: str) -> None:
    """OpenAI knows no finish_reason for a request that was cancelled, and a part of an answer must not pass for it."""
    if event.reason is Reason.CANCELLED:
        raise Cancelled(f"request {name} was cancelled")


def deadline_of(request: Request) -> float | None:
    """The moment of the loop's clock that the timeout header asks for."""
    given = request.headers.get(TIMEOUT_HEADER)
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds):
        raise InvalidArgument("X-Request-Timeout", "must be a number of seconds")
    return asyncio.get_running_loop().time() + seconds


async def failed(request: Request, error: Exception) -> Response:
    """Starlette's way to our errors."""
    assert isinstance(error, OrcaError)
    status, headers, body = failure(error)
    return JSONResponse(body, status, headers)


async def refused(request: Request, error: Exception) -> Response:
    """Unknown paths and methods, in OpenAI's shape."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    _, _, body = failure(NotFound(message))
    return JSONResponse(body, error.status_code, error.headers)
