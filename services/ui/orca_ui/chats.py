"""Passes chats and completions on to an endpoint's HTTP door, so that a browser needs one address."""

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any, TypeVar

import httpx2
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from orca_common.roles import Role

log = logging.getLogger(__name__)

T = TypeVar("T")

MOST_BYTES = 1 << 20  # of a body
MOST_AT_ONCE = 64
ANSWER_SECONDS = 600.0  # for a part of an answer: a request may wait in the queue
PASSED = ("content-type", "retry-after", "x-request-id")  # headers of answers that a browser gets


class Chats:
    """Calls one endpoint. `context` makes the TLS of a connection; None: plaintext."""

    def __init__(self, url: str, context: Callable[[], ssl.SSLContext] | None) -> None:
        self._extensions = {"sni_hostname": Role.ENDPOINT.dns_name} if context is not None else {}
        timeout = httpx2.Timeout(10.0, read=ANSWER_SECONDS)
        limits = httpx2.Limits(max_connections=MOST_AT_ONCE)
        verify = context() if context is not None else False
        self._client = httpx2.AsyncClient(base_url=url, timeout=timeout, limits=limits, verify=verify, trust_env=False)
        self._open = 0

    async def close(self) -> None:
        await self._client.aclose()

    async def models(self, request: Request) -> Response:
        """The endpoint's models."""
        return await self._call("GET", "/v1/models", request, b"")

    async def chat(self, request: Request) -> Response:
        return await self._post(request, "/v1/chat/completions")

    async def complete(self, request: Request) -> Response:
        return await self._post(request, "/v1/completions")

    async def _post(self, request: Request, path: str) -> Response:
        if request.headers.get("content-type", "").partition(";")[0] != "application/json":
            return failed(415, "the content-type must be application/json")  # a form of another site has another one
        body = b""
        try:
            async for part in request.stream():
                body += part
                if len(body) > MOST_BYTES:
                    return failed(413, f"the body has more than {MOST_BYTES} bytes")
        except ClientDisconnect:
            return Response(status_code=499)
        return await self._call("POST", path, request, body)

    async def _call(self, method: str, path: str, request: Request, body: bytes) -> Response:
        if self._open >= MOST_AT_ONCE:
            return failed(429, f"{MOST_AT_ONCE} answers are under way here; try again in a moment")
        headers = {name: value for name in ("authorization", "content-type") if (value := request.headers.get(name))}
        opened = AsyncExitStack()
        self._open += 1
        opened.callback(self._closed)
        call = self._client.stream(method, path, content=body, headers=headers, extensions=self._extensions)
        try:
            answer = await unless_left(request, opened.enter_async_context(call))
        except (httpx2.HTTPError, OSError) as error:  # ssl.SSLError is one
            await opened.aclose()
            log.info("the endpoint cannot be reached", extra={"why": repr(error)})
            return failed(503, "the endpoint cannot be reached now; try again in a moment")
        except ClientDisconnect:
            await opened.aclose()
            return Response(status_code=499)
        except asyncio.CancelledError:
            await opened.aclose()
            raise
        passed = {name: answer.headers[name] for name in PASSED if name in answer.headers}
        return Passed(_parts(answer), answer.status_code, passed, opened)

    def _closed(self) -> None:
        self._open -= 1

    async def text_of(self, request: Request, ids: list[int]) -> str | None:
        """The text of token ids; None where the endpoint does not answer."""
        headers = {"authorization": value} if (value := request.headers.get("authorization")) else {}
        try:
            answer = await self._client.post(
                "/detokenize", json={"tokens": ids}, headers=headers, extensions=self._extensions
            )
            return str(answer.json()["prompt"])
        except (httpx2.HTTPError, OSError, ValueError, KeyError):
            return None


class Passed(StreamingResponse):
    """An answer that is passed on. Its connection is closed when the browser leaves, which cancels the request, also
    where it left before the first part."""

    def __init__(
        self, parts: AsyncIterator[bytes], status: int, headers: dict[str, str], opened: AsyncExitStack
    ) -> None:
        super().__init__(parts, status, headers)
        self._opened = opened

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._opened:
            await super().__call__(scope, receive, send)


async def _parts(answer: httpx2.Response) -> AsyncIterator[bytes]:
    """The answer as it comes."""
    try:
        async for part in answer.aiter_raw():
            yield part
    except (httpx2.HTTPError, OSError) as error:  # ssl.SSLError is one
        log.info("an answer was cut off", extra={"why": repr(error)})


async def unless_left(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of work. Cancels it and raises ClientDisconnect when the browser leaves first."""

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.create_task(work), asyncio.create_task(left())
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return await working
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


def failed(status: int, why: str) -> Response:
    """An error in OpenAI's shape."""
    return JSONResponse({"error": {"message": why, "type": "server_error", "param": None, "code": None}}, status)
