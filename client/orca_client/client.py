"""The client for threads."""

import queue
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from types import TracebackType
from typing import Any, Self

import grpc

from orca.v1.orca_pb2 import CancelRequest, GenerateRequest, GenerateResponse, GetModelRequest

from .base import CLOSING_TIMEOUT, UNARY_TIMEOUT, BaseClient, BaseStream, OnLeave
from .channels import Channels, Options, Rpc
from .errors import Cancelled, DeadlineExceeded, OrcaError, Unavailable
from .events import Event, Model, model_of
from .leaving import Leaving
from .many import INTERVAL, Answer, Many, Progress, Prompt
from .resumption import Resumption
from .routing import routed
from .tracing import Metadata, Trace

SINGLE_THREADED = "SingleThreadedUnaryStream"  # grpc.experimental.ChannelOptions, which its type stubs lack


class Stream(BaseStream):
    """The events of one request: an iterator that resumes by itself. Each token comes exactly once, in order.

    The iteration stops after Finished, or raises the error that ended the request. A stream that is left before its end
    (a `for` loop that is left, a stream that is dropped, a client that is closed) cancels its request: nobody waits for
    the rest. With `on_leave="detach"`, or after `detach`, the request lives on for its `detach_grace` instead, and
    `client.resume(stream.request_id, len(stream.tokens))` continues it.

    One thread iterates; any thread may call `cancel`, `detach` and `close`.
    """

    _began = False  # whether the first call was made

    def __init__(
        self,
        client: "OrcaClient",
        channels: Channels,
        leaving: Leaving,
        resumption: Resumption,
        trace: Trace,
        on_leave: OnLeave,
    ) -> None:
        super().__init__(resumption, trace, on_leave)
        self._client, self._channels, self._leaving = client, channels, leaving
        self._left = threading.Event()
        self._target = ""
        self._call: Any = self._start()  # None: no call is under way
        self._began = True

    def __del__(self) -> None:
        self.leave()

    def __iter__(self) -> "Loop":
        return Loop(self)

    def __next__(self) -> Event:
        while self._resumption.finished is None:
            try:
                event = self._resumption.event()
            except OrcaError:
                self._drop()
                raise
            if event is not None:
                return event
            response = self._read()
            if response is not None and not self._left.is_set():
                self._channels.answered = True
                self._resumption.take(response, time.monotonic())
        self._drain()
        raise StopIteration

    def text(self) -> str:
        """Waits for the end and returns the whole text. Raises Cancelled when it was cut short."""
        for _ in self:
            pass
        return self._whole_text()

    def cancel(self) -> bool:
        """Cancels the request, and returns whether it was alive. The stream then ends with Finished, CANCELLED."""
        return self._client.cancel(self.request_id, metadata=self._trace.metadata)

    def detach(self) -> None:
        """Ends the stream; the request lives on for its `detach_grace`. Further iteration raises Cancelled."""
        self._end_trace()
        self._left.set()
        self._cancel_call()

    def leave(self) -> None:
        """Ends the stream as one that is dropped: does what `on_leave` says, without waiting for it."""
        if not self._began or self._resumption.ended or self._left.is_set():
            return
        self._end_trace()
        self._left.set()
        request_id = self.request_id if self.on_leave == "cancel" else ""
        target = self._target if self._call is not None else ""
        self._leaving.add(request_id, target, self._call, self._trace.metadata)

    def close(self) -> None:
        """Cancels the request unless it has ended, and ends the stream."""
        if not self._resumption.ended and not self._left.is_set():
            with suppress(OrcaError):  # no endpoint can be reached: the request ends after its detach_grace
                self._client.cancel(self.request_id, timeout=CLOSING_TIMEOUT, metadata=self._trace.metadata)
        self.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # -- the driver of Resumption
    def _start(self) -> Any:
        call = self._resumption.call(time.monotonic())
        self._target = self._channels.pick()
        rpc: Rpc = "Generate" if isinstance(call.request, GenerateRequest) else "Resume"
        try:
            return self._channels.call(self._target, rpc, call.request, call.timeout, self._trace.metadata)
        except ValueError:  # grpc raises it for a channel that another thread closed meanwhile
            if self._channels.closed:
                raise Cancelled("the client was closed") from None
            raise

    def _read(self) -> GenerateResponse | None:
        """The next response. None: the call failed, and the next one continues."""
        if self._left.is_set():
            raise self._was_closed()
        if self._call is None:
            self._call = self._start()
            if self._left.is_set():  # by a `detach` that came before this call could be seen
                self._drop()
                return None
        try:
            return next(self._call)
        except StopIteration:
            error: OrcaError = self._resumption.broken()
        except grpc.RpcError as failure:
            error = self._channels.error(failure, self._target)
        except BaseException:  # Ctrl-C: a response may be lost, so the next call resumes
            self._drop()
            raise
        self._drop()
        if not self._left.is_set():
            self._left.wait(self._resumption.failed(error, time.monotonic()))
        return None

    def _drain(self) -> None:
        """Reads the status that follows the last event, so that the server too sees the call end well."""
        call, self._call = self._call, None
        if call is not None and not self._left.is_set():
            with suppress(grpc.RpcError):  # the request has finished, however its call ended
                next(call, None)

    def _drop(self) -> None:
        self._cancel_call()
        self._call = None

    def _cancel_call(self) -> None:
        call = self._call
        if call is not None:
            call.cancel()


class Loop(Iterator[Event]):
    """One loop over a stream. When the loop is left before the stream's end, the stream is left, unless it detaches."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __del__(self) -> None:
        if self._stream.on_leave == "cancel":
            self._stream.leave()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        return next(self._stream)


class OrcaClient(BaseClient[Stream]):
    """Calls Orca from threads, which may share it.

    with OrcaClient("127.0.0.1:50051") as client:
        print(client.generate("Once upon a time", max_new_tokens=64).text())
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
    ) -> Iterator[Answer]:
        """Generates for many prompts, `concurrency` of them at a time, and gives their answers.

        A prompt that fails has its error in its answer; the others go on. in_order: answers in the order of the
        prompts; False: as they come. progress: called after each prompt with how many have ended, and of how many
        (None when `prompts` has no length). arguments: those of `generate`, for all prompts; a `stream_interval` of 16
        if none is given, since nobody reads along. When the iteration is left early, the requests that run are
        cancelled.
        """
        many = Many(prompts, concurrency, in_order, progress)
        return self._many(
            many, concurrency, {"stream_interval": INTERVAL, **arguments, "max_new_tokens": max_new_tokens}
        )

    def _many(self, many: Many, concurrency: int, arguments: dict[str, Any]) -> Iterator[Answer]:
        ended: queue.SimpleQueue[Future[Answer]] = queue.SimpleQueue()
        streams: dict[int, Stream] = {}
        left = threading.Event()

        def run(position: int, prompt: Prompt) -> Answer:
            try:
                stream = streams[position] = self.generate(prompt, **arguments)
            except OrcaError as error:
                return Answer(position, prompt, "", "", (), None, error)
            if left.is_set():  # too late for the look at all streams below
                stream.close()
            try:
                return stream.answer(position, prompt, stream.text(), None)
            except OrcaError as error:
                return stream.answer(position, prompt, "", error)

        with ThreadPoolExecutor(concurrency, "orca-many") as threads:
            try:
                while True:
                    for position, prompt in many.start():
                        threads.submit(run, position, prompt).add_done_callback(ended.put)
                    if not many.running:
                        return
                    answer = ended.get().result()
                    streams.pop(answer.position, None)
                    yield from many.end(answer)
            finally:
                left.set()
                threads.shutdown(wait=False, cancel_futures=True)
                for stream in list(streams.values()):
                    stream.close()

    def cancel(
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
        return self._unary("Cancel", request, timeout, (*routed(model), *metadata)).alive

    def get_model(self, *, timeout: float = UNARY_TIMEOUT, model: str = "") -> Model:
        """The model, its limits and its engines. model: which one, where several releases share one address."""
        return model_of(self._unary("GetModel", GetModelRequest(), timeout, routed(model)))

    def close(self) -> None:
        """Leaves the streams that have not ended, which then raise Cancelled, and closes the channels."""
        for stream in list(self._streams):
            stream.leave()
        self._leaving.close()
        for channel in self._channels.close():
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # -- the drivers
    @cached_property
    def _leaving(self) -> Leaving:
        return Leaving(self._channels, CLOSING_TIMEOUT)

    def _open(self, resumption: Resumption, trace: Trace, on_leave: OnLeave) -> Stream:
        self._leaving.start()
        stream = Stream(self, self._channels, self._leaving, resumption, trace, on_leave)
        self._streams.add(stream)
        return stream

    def _unary(self, rpc: Rpc, request: Any, timeout: float, metadata: Metadata) -> Any:
        """Makes an idempotent call, at one address after the other, until one answers or the timeout passes."""
        patience = self._patience(timeout, timeout)
        while True:
            target = self._channels.pick()
            try:
                left = patience.remaining(time.monotonic())
                answer = self._channels.call(target, rpc, request, left, metadata)
                self._channels.answered = True
                return answer
            except grpc.RpcError as failure:
                error = self._channels.error(failure, target)
            if isinstance(error, DeadlineExceeded) and not error.answered:
                raise patience.expired()
            if not isinstance(error, Unavailable):
                raise error
            time.sleep(patience.failed(error, time.monotonic()))

    @staticmethod
    def _new_channel(target: str, credentials: grpc.ChannelCredentials | None, options: Options) -> grpc.Channel:
        # The thread that reads a stream does all its work: 41 microseconds of CPU per token instead of 58.
        options = [*options, (SINGLE_THREADED, 1)]
        if credentials is None:
            return grpc.insecure_channel(target, options)
        return grpc.secure_channel(target, credentials, options)
