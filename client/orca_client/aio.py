"""The client for asyncio."""

import asyncio
import time
from types import TracebackType
from typing import Any, Self

import grpc

from orca.v1.orca_pb2 import CancelRequest, GenerateRequest, GenerateResponse, GetModelRequest

from .base import CLOSING_TIMEOUT, UNARY_TIMEOUT, BaseClient, BaseStream
from .errors import Cancelled, OrcaError, Unavailable
from .events import Event, Model, model_of
from .resumption import Resumption


class AsyncStream(BaseStream):
    """The events of one request: an async iterator that resumes by itself. Each token comes exactly once, in order.

    Iterated to its end, it raises what ended the request, or stops after Finished. One that is dropped before (an
    `async for` that is left, a reading task that is cancelled) only detaches: the request lives on for its
    `detach_grace`; iterating on, or `client.resume(stream.request_id, len(stream.tokens))`, takes it up. To cancel,
    call `cancel` or `close`, or use `async with`: leaving the block closes.
    """

    _call: Any = None  # a grpc.aio call; None between two

    def __init__(self, client: "AsyncOrcaClient", resumption: Resumption) -> None:
        super().__init__(resumption)
        self._client = client
        self._loop = asyncio.get_running_loop()
        self._left = asyncio.Event()
        self._target = ""
        self._call = self._start()

    def __del__(self) -> None:  # grpc.aio itself keeps a call alive that nobody holds; and this may be any thread
        if self._call is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._call.cancel)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        while self._resumption.finished is None:
            response = await self._read()
            if response is None:
                continue
            try:
                event = self._resumption.take(response, time.monotonic())
            except OrcaError:
                self._drop()
                raise
            if event is not None:
                return event
        await self._drain()
        raise StopAsyncIteration

    async def text(self) -> str:
        """Waits for the end and returns the whole text. Raises Cancelled when it was cut short."""
        async for _ in self:
            pass
        return self._whole_text()

    async def cancel(self) -> bool:
        """Cancels the request; answers whether it was alive. The stream then ends with Finished, reason CANCELLED."""
        return await self._client.cancel(self.request_id)

    def detach(self) -> None:
        """Ends the stream here, and leaves the request alive for its `detach_grace`. Iterating on raises Cancelled."""
        self._left.set()
        if self._call is not None:
            self._call.cancel()

    async def close(self) -> None:
        """Cancels the request unless it has ended, and ends the stream."""
        try:
            if not self._resumption.ended and not self._left.is_set():
                await self._client.cancel(self.request_id, timeout=CLOSING_TIMEOUT)
        except OrcaError:
            pass  # no endpoint can be told: its detach_grace ends the request
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
        self._target = self._client._pick()
        stub = self._client._stub(self._target)
        rpc = stub.Generate if isinstance(call.request, GenerateRequest) else stub.Resume
        return rpc(call.request, timeout=call.timeout, metadata=self._client._metadata)

    async def _read(self) -> GenerateResponse | None:
        """The next response; None when the call failed and another one is due."""
        if self._left.is_set():
            raise self._was_closed()
        if self._call is None:
            self._call = self._start()
        try:
            response = await self._call.read()
            if isinstance(response, GenerateResponse):  # and not EOF
                return response
            error: OrcaError = self._resumption.broken()
        except grpc.RpcError as failure:
            error = self._client._error(failure, self._target)
        except asyncio.CancelledError:
            self._drop()  # grpc has cancelled the call; the next one resumes
            if is_cancelled():
                raise
            error = Cancelled("the client was closed")  # or the stream was: then `_left` is set
        self._drop()
        if not self._left.is_set():
            await self._pause(self._resumption.failed(error, time.monotonic()))
        return None

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._left.wait()
        except TimeoutError:
            pass

    async def _drain(self) -> None:
        """Reads the status after the last event, so that the call ends well at the server too."""
        call, self._call = self._call, None
        if call is not None and not self._left.is_set():
            try:
                await call.read()
            except grpc.RpcError:
                pass  # the request has ended, whatever became of its call
            except asyncio.CancelledError:
                if is_cancelled():
                    raise

    def _drop(self) -> None:
        if self._call is not None:
            self._call.cancel()
            self._call = None


class AsyncOrcaClient(BaseClient[AsyncStream]):
    """Calls Orca from one event loop.

    async with AsyncOrcaClient("127.0.0.1:50051") as client:
        print(await client.generate("Once upon a time", max_new_tokens=64).text())
    """

    async def cancel(self, request_id: str, *, timeout: float = UNARY_TIMEOUT) -> bool:
        """Cancels a request, wherever it is. Answers whether it was alive. Raises NotFound."""
        return (await self._unary("Cancel", CancelRequest(request_id=request_id), timeout)).alive

    async def get_model(self, *, timeout: float = UNARY_TIMEOUT) -> Model:
        """The model, its limits and its engines."""
        return model_of(await self._unary("GetModel", GetModelRequest(), timeout))

    async def close(self) -> None:
        """Closes the channels. Streams that have not ended detach, and raise Cancelled."""
        self._closed = True
        for channel in self._channels:
            await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    # -- the drivers
    def _open(self, resumption: Resumption) -> AsyncStream:
        return AsyncStream(self, resumption)

    async def _unary(self, name: str, request: Any, timeout: float) -> Any:
        """An idempotent call, tried over the addresses until the timeout."""
        patience = self._patience(timeout, timeout)
        while True:
            target = self._pick()
            try:
                rpc = getattr(self._stub(target), name)
                return await rpc(request, timeout=patience.remaining(time.monotonic()), metadata=self._metadata)
            except grpc.RpcError as failure:
                error = self._error(failure, target)
            except asyncio.CancelledError:
                if is_cancelled() or not self._closed:
                    raise
                error = Cancelled("the client was closed")
            if not isinstance(error, Unavailable):
                raise error
            await asyncio.sleep(patience.failed(error, time.monotonic()))

    def _new_channel(self, target: str) -> grpc.aio.Channel:
        if self._credentials is None:
            return grpc.aio.insecure_channel(target, self._channel_options())
        return grpc.aio.secure_channel(target, self._credentials, self._channel_options())


def is_cancelled() -> bool:
    """Whether the running task itself was cancelled. (grpc.aio also raises CancelledError when only its call was.)"""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
