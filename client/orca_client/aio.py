"""The client for asyncio."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from functools import cached_property
from types import TracebackType
from typing import Any, Self

import grpc

from orca.v1.orca_pb2 import CancelRequest, GenerateRequest, GenerateResponse, GetModelRequest

from .base import CLOSING_TIMEOUT, UNARY_TIMEOUT, BaseClient, BaseStream, OnLeave
from .channels import Channels, Options, Rpc
from .errors import Cancelled, DeadlineExceeded, OrcaError, Unavailable
from .events import Event, Model, model_of
from .many import INTERVAL, Answer, Many, Progress, Prompt
from .resumption import Resumption
from .routing import routed
from .tracing import Metadata, Trace


class AsyncStream(BaseStream):
    """The events of one request: an async iterator that resumes by itself. Each token comes exactly once, in order.

    The iteration stops after Finished, or raises the error that ended the request. A stream that is left before its end
    (an `async for` that is left, a task with such a loop that is cancelled, a stream that is dropped, a client that is
    closed) cancels its request: nobody waits for the rest. With `on_leave="detach"`, or after `detach`, the request
    lives on for its `detach_grace` instead, and `client.resume(stream.request_id, len(stream.tokens))` continues it.
    """

    _began = False  # whether the first call was made
    _abandoned = False  # another thread may not set an asyncio.Event

    def __init__(
        self,
        client: "AsyncOrcaClient",
        channels: Channels,
        leaving: "AsyncLeaving",
        resumption: Resumption,
        trace: Trace,
        on_leave: OnLeave,
    ) -> None:
        super().__init__(resumption, trace, on_leave)
        self._client, self._channels, self._leaving = client, channels, leaving
        self._loop = asyncio.get_running_loop()
        self._left = asyncio.Event()
        self._target = ""
        self._call: Any = self._start()  # of grpc.aio; None: no call is under way
        self._began = True

    def __del__(self) -> None:  # any thread may run this
        self.leave()

    def __aiter__(self) -> "AsyncLoop":
        return AsyncLoop(self)

    async def __anext__(self) -> Event:
        while self._resumption.finished is None:
            try:
                event = self._resumption.event()
            except OrcaError:
                self._drop()
                raise
            if event is not None:
                return event
            response = await self._read()
            if response is not None and not self._was_left():
                self._channels.answered = True
                self._resumption.take(response, time.monotonic())
        await self._drain()
        raise StopAsyncIteration

    async def text(self) -> str:
        """Waits for the end and returns the whole text. Raises Cancelled when it was cut short."""
        async for _ in self:
            pass
        return self._whole_text()

    async def cancel(self) -> bool:
        """Cancels the request, and returns whether it was alive. The stream then ends with Finished, CANCELLED."""
        return await self._client.cancel(self.request_id, metadata=self._trace.metadata)

    def detach(self) -> None:
        """Ends the stream; the request lives on for its `detach_grace`. Further iteration raises Cancelled."""
        self._end_trace()
        self._left.set()
        if self._call is not None:
            self._call.cancel()

    def leave(self) -> None:
        """Ends the stream as one that is dropped: does what `on_leave` says, without waiting for it."""
        if not self._began or self._was_left() or self._resumption.ended or self._loop.is_closed():
            return
        self._end_trace()
        self._abandoned = True
        call, tell = self._call, self._loop.call_soon_threadsafe
        tell(self._left.set)
        if self.on_leave == "cancel":
            target = self._target if call is not None else ""
            tell(self._leaving.add, self.request_id, target, call, self._trace.metadata)
        elif call is not None:  # grpc.aio keeps a dropped call alive
            tell(call.cancel)

    def _was_left(self) -> bool:
        return self._abandoned or self._left.is_set()

    async def close(self) -> None:
        """Cancels the request unless it has ended, and ends the stream."""
        try:
            if not self._resumption.ended and not self._was_left():
                await self._client.cancel(self.request_id, timeout=CLOSING_TIMEOUT, metadata=self._trace.metadata)
        except OrcaError:
            pass  # no endpoint can be reached: the request ends after its detach_grace
        finally:
            self.detach()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    # -- the driver of Resumption
    def _start(self) -> Any:
        call = self._resumption.call(time.monotonic())
        self._target = self._channels.pick()
        rpc: Rpc = "Generate" if isinstance(call.request, GenerateRequest) else "Resume"
        return self._channels.call(self._target, rpc, call.request, call.timeout, self._trace.metadata)

    async def _read(self) -> GenerateResponse | None:
        """The next response. None: the call failed, and the next one continues."""
        if self._was_left():
            raise self._was_closed()
        if self._call is None:
            self._call = self._start()
        try:
            response = await self._call.read()
            if isinstance(response, GenerateResponse):  # and not EOF
                return response
            error: OrcaError = self._resumption.broken()
        except grpc.RpcError as failure:
            error = self._channels.error(failure, self._target)
        except asyncio.CancelledError:
            self._drop()  # gRPC has cancelled the call too, so the next one resumes
            if is_cancelled():
                raise
            error = Cancelled("the client was closed")  # or only the stream: then `_left` is set
        self._drop()
        if not self._was_left():
            await self._pause(self._resumption.failed(error, time.monotonic()))
        return None

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._left.wait()
        except TimeoutError:
            pass

    async def _drain(self) -> None:
        """Reads the status that follows the last event, so that the server too sees the call end well."""
        call, self._call = self._call, None
        if call is not None and not self._was_left():
            try:
                await call.read()
            except grpc.RpcError:
                pass  # the request has finished, however its call ended
            except asyncio.CancelledError:
                if is_cancelled():
                    raise

    def _drop(self) -> None:
        if self._call is not None:
            self._call.cancel()
            self._call = None


class AsyncLoop(AsyncIterator[Event]):
    """One loop over a stream. When the loop is left before the stream's end, the stream is left, unless it detaches."""

    def __init__(self, stream: AsyncStream) -> None:
        self._stream = stream

    def __del__(self) -> None:
        if self._stream.on_leave == "cancel":
            self._stream.leave()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        return await anext(self._stream)


class AsyncLeaving:
    """Cancels the requests of streams that were left, in tasks of its own."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, request_id: str, target: str, call: Any, metadata: Metadata) -> None:
        """Cancels a request, and then ends its call. target: "" is any. metadata: goes with the Cancel."""
        task = asyncio.get_running_loop().create_task(self._cancel(request_id, target, call, metadata))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def settled(self) -> None:
        """Waits until all have been cancelled, for some seconds at most."""
        await asyncio.sleep(0)  # what other threads and the garbage collector have left is in `_tasks` now
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSING_TIMEOUT)

    async def _cancel(self, request_id: str, target: str, call: Any, metadata: Metadata) -> None:
        try:
            request = CancelRequest(request_id=request_id)
            await self._channels.call(target or self._channels.pick(), "Cancel", request, CLOSING_TIMEOUT, metadata)
        except (grpc.RpcError, OrcaError):
            pass  # the request ends after its detach_grace
        finally:
            if call is not None:
                call.cancel()


class AsyncOrcaClient(BaseClient[AsyncStream]):
    """Calls Orca from one event loop.

    async with AsyncOrcaClient("127.0.0.1:50051") as client:
        print(await client.generate("Once upon a time", max_new_tokens=64).text())
    """

    def generate_many(
        self,
        prompts: Iterable[Prompt],
        *,
        max_new_tokens: int,
        concurrency: int = 16,
        in_order: bool = True,
        progress: Progress | None = None,
        **arguments: Any,
    ) -> AsyncGenerator[Answer]:
        """Generates for many prompts, `concurrency` of them at a time, and gives their answers.

        A prompt that fails has its error in its answer; the others go on. in_order: answers in the order of the
        prompts; False: as they come. progress: called after each prompt with how many have ended, and of how many
        (None when `prompts` has no length). arguments: those of `generate`, for all prompts; a `stream_interval` of 16
        if none is given, since nobody reads along. When the iteration is left early, the requests that run are
        cancelled.
        """
        many = Many(prompts, concurrency, in_order, progress)
        return self._many(many, {"stream_interval": INTERVAL, **arguments, "max_new_tokens": max_new_tokens})

    async def _many(self, many: Many, arguments: dict[str, Any]) -> AsyncGenerator[Answer]:
        tasks: set[asyncio.Task[Answer]] = set()

        async def run(position: int, prompt: Prompt) -> Answer:
            try:
                stream = self.generate(prompt, **arguments)
            except OrcaError as error:
                return Answer(position, prompt, "", "", (), None, error)
            try:
                return stream.answer(position, prompt, await stream.text(), None)
            except OrcaError as error:
                return stream.answer(position, prompt, "", error)

        try:
            while True:
                tasks |= {asyncio.create_task(run(position, prompt)) for position, prompt in many.start()}
                if not many.running:
                    return
                done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    for answer in many.end(task.result()):
                        yield answer
        finally:
            for task in tasks:
                task.cancel()  # their streams are left
            await asyncio.gather(*tasks, return_exceptions=True)

    async def cancel(
        self,
        request_id: str,
        *,
        timeout: float = UNARY_TIMEOUT,
        model: str = "",
        metadata: Sequence[tuple[str, str]] = (),
    ) -> bool:
        """Cancels a request, wherever it is, and returns whether it was alive. Raises NotFound.

        model: the request's, where several releases share one address. metadata: as in `generate`.
        """
        request = CancelRequest(request_id=request_id)
        return (await self._unary("Cancel", request, timeout, (*routed(model), *metadata))).alive

    async def get_model(self, *, timeout: float = UNARY_TIMEOUT, model: str = "") -> Model:
        """The model, its limits and its engines. model: which one, where several releases share one address."""
        return model_of(await self._unary("GetModel", GetModelRequest(), timeout, routed(model)))

    async def close(self) -> None:
        """Leaves the streams that have not ended, which then raise Cancelled, and closes the channels."""
        for stream in list(self._streams):
            stream.leave()
        await self._leaving.settled()
        for channel in self._channels.close():
            await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    # -- the drivers
    @cached_property
    def _leaving(self) -> AsyncLeaving:
        return AsyncLeaving(self._channels)

    def _open(self, resumption: Resumption, trace: Trace, on_leave: OnLeave) -> AsyncStream:
        stream = AsyncStream(self, self._channels, self._leaving, resumption, trace, on_leave)
        self._streams.add(stream)
        return stream

    async def _unary(self, rpc: Rpc, request: Any, timeout: float, metadata: Metadata) -> Any:
        """Makes an idempotent call, at one address after the other, until one answers or the timeout passes."""
        patience = self._patience(timeout, timeout)
        while True:
            target = self._channels.pick()
            try:
                left = patience.remaining(time.monotonic())
                answer = await self._channels.call(target, rpc, request, left, metadata)
                self._channels.answered = True
                return answer
            except grpc.RpcError as failure:
                error = self._channels.error(failure, target)
            except asyncio.CancelledError:
                if is_cancelled() or not self._channels.closed:
                    raise
                error = Cancelled("the client was closed")
            if isinstance(error, DeadlineExceeded) and not error.answered:
                raise patience.expired()
            if not isinstance(error, Unavailable):
                raise error
            await asyncio.sleep(patience.failed(error, time.monotonic()))

    @staticmethod
    def _new_channel(target: str, credentials: grpc.ChannelCredentials | None, options: Options) -> grpc.aio.Channel:
        if credentials is None:
            return grpc.aio.insecure_channel(target, options)
        return grpc.aio.secure_channel(target, credentials, options)


def is_cancelled() -> bool:
    """Whether the running task itself was cancelled. grpc.aio raises CancelledError also when only its call was."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
