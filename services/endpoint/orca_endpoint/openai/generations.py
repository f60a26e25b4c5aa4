"""The generations of one HTTP request: a call each, and their events as one stream."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request

from ..calls.call import Call
from ..calls.endpoint import Endpoint
from ..calls.events import Event
from ..http.access import peer_of, tenant_in
from ..http.request_ids import exchange_in, labels_in
from ..requests.limits import Held
from ..requests.validation import MAX_INTERVAL
from .answer import Numbered
from .request import Asked

T = TypeVar("T")
AT_ONCE = 8  # generations that are checked, begun, ended or released in one turn of the loop: some 2 ms
AHEAD = 64  # lists of events that the calls of one request may be ahead of its client


async def turn(k: int) -> None:
    """Gives the loop to others before generation k, where AT_ONCE have had it."""
    if k and k % AT_ONCE == 0:
        await asyncio.sleep(0)


async def end(several: Sequence[T], ending: Callable[[T], object]) -> None:
    """Ends each of them, AT_ONCE in a turn of the loop; where this task is cancelled meanwhile, the others at once."""
    ended = 0
    try:
        while ended < len(several):
            ended += 1
            ending(several[ended - 1])
            await turn(ended)
    finally:
        for one in several[ended:]:
            ending(one)


def release(*lists: list[Any]) -> None:
    """Empties lists of what nothing else holds, AT_ONCE in a turn of the loop: by callbacks, as the end of a connection
    cancels the task that has answered."""
    for one in lists:
        del one[-AT_ONCE:]
    if any(lists):
        asyncio.get_running_loop().call_soon(release, *lists)


async def calls_of(asked: Asked, name: str, endpoint: Endpoint, request: Request, deadline: float | None) -> list[Call]:
    """Opens a call for each generation. None is left when one is refused, or the client leaves.

    name: the answer's id, by which a stream that breaks is taken up; that of the K-th of several has -K behind it.
    """
    carrier, tenant, host = dict(request.headers), tenant_in(request.scope), peer_of(request.scope)
    calls: list[Call] = []
    try:
        for k, sample in enumerate(asked.samples):
            await turn(k)
            sample.request.request_id = name if len(asked.samples) == 1 else f"{name}-{k}"
            if not asked.stream:
                sample.request.stream_interval = MAX_INTERVAL
            # The generations of one prompt are tokenized once.
            encoded = calls[-1].prompt_ids if k % asked.each else None
            call = await endpoint.generate(
                sample.request,
                deadline,
                carrier,
                sample.names,
                tenant=tenant,
                host=host,
                encoded=encoded,
                loose=asked.loose,
                kept=sample.kept,
                exchange=exchange_in(request.scope),
                open_end=sample.open_end,
            )
            call.label({**labels_in(request.scope), **asked.labels})
            calls.append(call)
    except BaseException as error:
        await end(calls, partial(Call.drop, error=error))
        raise
    return calls


def together(calls: list[Call], held: Held) -> AbstractAsyncContextManager[Numbered]:
    """Enters the calls. held: what the request's body holds of the shared bytes, until the pool has all requests."""
    return Single(calls[0], held) if len(calls) == 1 else Merged(calls, held)


class Single:
    """The events of one call, without the cost of a task and a queue."""

    def __init__(self, call: Call, held: Held) -> None:
        """held: what the request's body holds of the shared bytes, until the pool has the request."""
        self._call, self._held = call, held

    async def __aenter__(self) -> Numbered:
        await self._call.__aenter__()
        return self._events()

    async def _events(self) -> Numbered:
        async for piece in self._call.pieces():
            self._held.release()
            yield 0, piece

    async def __aexit__(self, *error: Any) -> None:
        await self._call.__aexit__(*error)


class Merged:
    """The events of several calls as they come. A client that reads slowly slows all of them down."""

    def __init__(self, calls: list[Call], held: Held) -> None:
        """held: as for `Single`, until the pool has all of them."""
        self._calls, self._held, self._submitting = calls, held, len(calls)
        self._queue: asyncio.Queue[tuple[int, list[Event] | Exception | None]] = asyncio.Queue(AHEAD)
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Numbered:
        try:
            for n, call in enumerate(self._calls):
                await turn(n)
                self._tasks.append(asyncio.create_task(self._pump(n, call)))
        except BaseException as error:
            try:
                await end(self._calls[len(self._tasks) :], partial(Call.drop, error=error))
            finally:
                await self.__aexit__()
            raise
        return self._events()

    async def __aexit__(self, *_: object) -> None:
        try:
            await end(self._tasks, asyncio.Task.cancel)
            await asyncio.gather(*self._tasks, return_exceptions=True)
        finally:
            release(self._calls, self._tasks)

    async def _pump(self, n: int, call: Call) -> None:
        try:
            async with call:
                accepted = False
                async for piece in call.pieces():
                    if not accepted:
                        accepted = True
                        self._accepted()
                    await self._queue.put((n, piece))
            await self._queue.put((n, None))
        except Exception as error:
            await self._queue.put((n, error))

    def _accepted(self) -> None:
        """The pool has one request more."""
        self._submitting -= 1
        if not self._submitting:
            self._held.release()

    async def _events(self) -> Numbered:
        left = len(self._calls)
        while left:
            n, piece = await self._queue.get()
            if piece is None:
                left -= 1
            elif isinstance(piece, Exception):
                raise piece  # the other calls end as if their client had left
            else:
                yield n, piece
