"""`POST /v1/completions`: one HTTP exchange from the body to the last byte of the answer.

`completion_request.py` reads the body, `completion_answer.py` writes JSON; here are the calls between them, the client
that may leave, and the deadline, which comes in the header `X-Request-Timeout`, in seconds. A client that closes its
connection ends its requests.
"""

import asyncio
import json
import math
import secrets
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from orca_common.errors import Cancelled, DeadlineExceeded, InvalidArgument, OrcaError, internal
from orca_pool.records import Reason

from .access import tenant_in
from .bodies import parsed
from .call import Call
from .call_line import note_error
from .completion_answer import Choice, Chunks, completion, failure, finish_reason
from .completion_request import Completion, parse
from .endpoint import Endpoint
from .events import Accepted, Finished, Token
from .merged import Merged, Numbered, Single

TIMEOUT_HEADER = "x-request-timeout"
DEADLINE_SLACK = 2.0  # seconds


class Completions:
    """The method as an ASGI application. A Starlette endpoint would not hear that its client leaves."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        answer = Answer(send)
        try:
            raw = await request.body()
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
        wanted = await parsed(raw, lambda body: parse(body, endpoint.settings.max_prompts), endpoint.large)
        name = f"cmpl-{secrets.token_hex(12)}"
        tenant = tenant_in(request.scope)
        calls: list[Call] = []
        try:
            for n, prompt in enumerate(wanted.prompts):
                prompt.request.request_id = name if len(wanted.prompts) == 1 else f"{name}-{n}"
                calls.append(await endpoint.generate(prompt.request, deadline, carrier, prompt.names, tenant=tenant))
        except BaseException as error:  # a prompt was refused, or the client has left
            for call in calls:
                call.drop(error)
            raise
        opened = Single(calls[0]) if len(calls) == 1 else Merged(calls)
        async with opened as events, until(deadline):
            choices = [Choice() for _ in calls]
            if wanted.stream:
                await self._stream(events, choices, wanted, name, answer)
            else:
                await self._whole(events, choices, wanted, name, answer)

    async def _stream(
        self, events: Numbered, choices: list[Choice], wanted: Completion, name: str, answer: "Answer"
    ) -> None:
        """Sends headers with the first event, so that a refusal has its own status.

        Tokens that are there together are one chunk.
        """
        chunks = Chunks(name, self._endpoint.name, wanted.include_usage, wanted.logprobs)
        async for n, piece in events:
            if not answer.started:
                await answer.start_stream()
            choice = choices[n]
            sent = chunks.tokens(n, choice, [event for event in piece if type(event) is Token])
            first, last = piece[0], piece[-1]
            if isinstance(first, Accepted):
                choice.input_tokens = first.input_tokens
            if isinstance(last, Finished):
                check_whole(last, name)
                choice.output_tokens = last.output_tokens
                sent += chunks.finished(n, last)
            if sent:
                await answer.write(sent)
        if wanted.include_usage:
            await answer.write(
                chunks.usage(sum(c.input_tokens for c in choices), sum(c.output_tokens for c in choices))
            )
        await answer.write(b"data: [DONE]\n\n")
        await answer.end()

    async def _whole(
        self, events: Numbered, choices: list[Choice], wanted: Completion, name: str, answer: "Answer"
    ) -> None:
        async for n, piece in events:
            choice = choices[n]
            for event in piece:
                if isinstance(event, Token):
                    choice.texts.append(event.text)
                    if wanted.logprobs:
                        choice.tokens.append(event)
                elif isinstance(event, Accepted):
                    choice.input_tokens = event.input_tokens
                else:
                    check_whole(event, name)
                    choice.texts.append(event.text)
                    choice.output_tokens, choice.finish = event.output_tokens, finish_reason(event.reason)
        await answer.json(200, {}, completion(name, self._endpoint.name, choices, wanted.logprobs))


class Answer:
    """One HTTP answer: a whole one, or a stream of server-sent events."""

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
        """Sends the error as the answer, or as the last event of a stream that has begun (no [DONE] follows then)."""
        note_error(error)
        status, headers, body = failure(error)
        if self.started:
            await self.write(f"data: {json.dumps(body)}\n\n".encode())
            await self.end()
        else:
            await self.json(status, headers, body)


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


def check_whole(event: Finished, name: str) -> None:
    """Raises Cancelled for a request that was cancelled: OpenAI has no finish_reason for a part of an answer."""
    if event.reason is Reason.CANCELLED:
        raise Cancelled(f"request {name} was cancelled")


def deadline_of(request: Request) -> float | None:
    """The deadline that the timeout header asks for, as a moment of the loop's clock."""
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
