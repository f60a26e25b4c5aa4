"""The client for threads."""

import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import grpc

from orca.v1.orca_pb2 import CancelRequest, GenerateRequest, GenerateResponse, GetModelRequest

from .base import CLOSING_TIMEOUT, UNARY_TIMEOUT, BaseClient, BaseStream
from .errors import Cancelled, OrcaError, Unavailable
from .events import Event, Model, model_of
from .resumption import Resumption

SINGLE_THREADED = "SingleThreadedUnaryStream"  # grpc.experimental.ChannelOptions, which its type stubs lack


class Stream(BaseStream):
    """The events of one request: an iterator that resumes by itself. Each token comes exactly once, in order.

    Iterated to its end, it raises what ended the request, or stops after Finished. One that is dropped before (a `for`
    that is left) only detaches: the request lives on for its `detach_grace`, and `client.resume(stream.request_id,
    len(stream.tokens))` takes it up. To cancel, call `cancel` or `close`, or use `with`: leaving the block closes.

    One thread iterates; `cancel`, `detach` and `close` may come from any.
    """

    def __init__(self, client: "OrcaClient", resumption: Resumption) -> None:
        super().__init__(resumption)
        self._client = client
        self._left = threading.Event()
        self._target = ""
        self._call: Any = self._start()  # a grpc call: an iterator, cancelled when it is dropped; None between two

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        while self._resumption.finished is None:
            response = self._read()
            if response is None:
                continue
            try:
                event = self._resumption.take(response, time.monotonic())
            except OrcaError:
                self._drop()
                raise
            if event is not None:
                return event
        self._drain()
        raise StopIteration

    def text(self) -> str:
        """Waits for the end and returns the whole text. Raises Cancelled when it was cut short."""
        for _ in self:
            pass
        return self._whole_text()

    def cancel(self) -> bool:
        """Cancels the request; answers whether it was alive. The stream then ends with Finished, reason CANCELLED."""
        return self._client.cancel(self.request_id)

    def detach(self) -> None:
        """Ends the stream here, and leaves the request alive for its `detach_grace`. Iterating on raises Cancelled."""
        self._left.set()
        self._cancel_call()

    def close(self) -> None:
        """Cancels the request unless it has ended, and ends the stream."""
        if not self._resumption.ended and not self._left.is_set():
            with suppress(OrcaError):  # when no endpoint can be told, detach_grace ends the request
                self._client.cancel(self.request_id, timeout=CLOSING_TIMEOUT)
        self.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # -- the driver of Resumption
    def _start(self) -> Any:
        call = self._resumption.call(time.monotonic())
        self._target = self._client._pick()
        stub = self._client._stub(self._target)
        rpc = stub.Generate if isinstance(call.request, GenerateRequest) else stub.Resume
        try:
            return rpc(call.request, timeout=call.timeout, metadata=self._client._metadata)
        except ValueError:  # grpc's word for a channel that another thread closed meanwhile
            if self._client._closed:
                raise Cancelled("the client was closed") from None
            raise

    def _read(self) -> GenerateResponse | None:
        """The next response; None when the call failed and another one is due."""
        if self._left.is_set():
            raise self._was_closed()
        if self._call is None:
            self._call = self._start()
            if self._left.is_set():  # by a `detach` that may not have seen this call
                self._drop()
                return None
        try:
            return next(self._call)
        except StopIteration:
            error: OrcaError = self._resumption.broken()
        except grpc.RpcError as failure:
            error = self._client._error(failure, self._target)
        except BaseException:  # Ctrl-C: what the call had in hand is unknown, so the next one resumes
            self._drop()
            raise
        self._drop()
        if not self._left.is_set():
            self._left.wait(self._resumption.failed(error, time.monotonic()))
        return None

    def _drain(self) -> None:
        """Reads the status after the last event, so that the call ends well at the server too."""
        call, self._call = self._call, None
        if call is not None and not self._left.is_set():
            with suppress(grpc.RpcError):  # the request has ended, whatever became of its call
                next(call, None)

    def _drop(self) -> None:
        self._cancel_call()
        self._call = None

    def _cancel_call(self) -> None:
        call = self._call
        if call is not None:
            call.cancel()


class OrcaClient(BaseClient[Stream]):
    """Calls Orca from threads; may be shared between them.

    with OrcaClient("127.0.0.1:50051") as client:
        print(client.generate("Once upon a time", max_new_tokens=64).text())
    """

    def cancel(self, request_id: str, *, timeout: float = UNARY_TIMEOUT) -> bool:
        """Cancels a request, wherever it is. Answers whether it was alive. Raises NotFound."""
        return self._unary("Cancel", CancelRequest(request_id=request_id), timeout).alive

    def get_model(self, *, timeout: float = UNARY_TIMEOUT) -> Model:
        """The model, its limits and its engines."""
        return model_of(self._unary("GetModel", GetModelRequest(), timeout))

    def close(self) -> None:
        """Closes the channels. Streams that have not ended detach, and raise Cancelled."""
        self._closed = True
        for channel in self._channels:
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # -- the drivers
    def _open(self, resumption: Resumption) -> Stream:
        return Stream(self, resumption)

    def _unary(self, name: str, request: Any, timeout: float) -> Any:
        """An idempotent call, tried over the addresses until the timeout."""
        patience = self._patience(timeout, timeout)
        while True:
            target = self._pick()
            try:
                rpc = getattr(self._stub(target), name)
                return rpc(request, timeout=patience.remaining(time.monotonic()), metadata=self._metadata)
            except grpc.RpcError as failure:
                error = self._error(failure, target)
            if not isinstance(error, Unavailable):
                raise error
            time.sleep(patience.failed(error, time.monotonic()))

    def _new_channel(self, target: str) -> grpc.Channel:
        # The thread that reads a stream does all its work: 41 microseconds of CPU per token instead of 58.
        options = [*self._channel_options(), (SINGLE_THREADED, 1)]
        if self._credentials is None:
            return grpc.insecure_channel(target, options)
        return grpc.secure_channel(target, self._credentials, options)
