"""Orca's gRPC door for the bench: streams of Generate over one connection, by the library h2.

A client takes its time from the cores that it measures. For a token grpc.aio's takes 30 us, this one 8 us: it notes
when messages come, and parses them when their stream has ended.
"""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self, cast

import grpc
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import DataReceived, Event, ResponseReceived, StreamEnded, StreamReset, TrailersReceived
from h2.exceptions import ProtocolError

from orca.v1 import orca_pb2 as pb
from orca.v1.orca_pb2_grpc import OrcaStub
from orca_client.channels import channel_options
from orca_common.address import split_address
from orca_common.errors import FailedPrecondition

from .measures import Answer

HEADERS = (
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/orca.v1.Orca/Generate"),
    (":authority", "orca"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
)
PREFIX = 5  # bytes before a message
WINDOW = 1 << 30  # bytes: the bench reads all that comes


class GrpcDoor:
    """`Door` to an endpoint of Orca. It resumes nothing: a call that fails is an error.

    `patience`: seconds that the server may take to answer the first call. `interval`: the requests' `stream_interval`.
    """

    def __init__(self, address: str, label: str = "orca-grpc", patience: float = 10.0, interval: int = 1) -> None:
        self.address, self.label, self.patience, self.interval = address, label, patience, interval

    async def __aenter__(self) -> Self:
        """Connects. Raises FailedPrecondition when nobody answers."""
        async with grpc.aio.insecure_channel(self.address, channel_options(keepalive=30.0)) as channel:
            try:
                request = pb.GetModelRequest()
                self.model: pb.GetModelResponse = await OrcaStub(channel).GetModel(
                    request, wait_for_ready=True, timeout=self.patience
                )
            except grpc.aio.AioRpcError as error:
                raise FailedPrecondition(f"address: {self.address} does not answer ({error.details()})") from None
        host, port = split_address(self.address)
        loop = asyncio.get_running_loop()
        _, self._connection = await loop.create_connection(Connection, host, port)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._connection.close()

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    async def ask(self, answer: Answer, clock: Callable[[], float]) -> None:
        prompt, output = answer.request
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=prompt),
            max_new_tokens=output,
            ignore_eos=True,
            stream_interval=self.interval,
        )
        stream = await self._connection.call(request.SerializeToString(), clock)
        try:
            answer.error = await stream.over
        except asyncio.CancelledError:  # the load's patience is over
            self._connection.cancel(stream)
            raise
        answer.ended = clock()
        for moment, event in stream.messages():
            if event.tokens:
                answer.came.append(moment)
            if event.HasField("finished"):
                answer.tokens = event.finished.output_tokens


class CallStream:
    """One call: what came, and when."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.came: list[tuple[float, bytes]] = []
        self.over: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # why it failed; "": it did not

    def messages(self) -> list[tuple[float, pb.GenerateResponse]]:
        """The messages, each with the moment at which it was whole."""
        found, rest = list[tuple[float, pb.GenerateResponse]](), b""
        for moment, data in self.came:
            rest += data
            while len(rest) >= PREFIX and len(rest) >= (end := PREFIX + int.from_bytes(rest[1:PREFIX])):
                found.append((moment, pb.GenerateResponse.FromString(rest[PREFIX:end])))
                rest = rest[end:]
        return found

    def end(self, error: str) -> None:
        if not self.over.done():
            self.over.set_result(error)


class Connection(asyncio.Protocol):
    """The client's side of HTTP/2."""

    def __init__(self) -> None:
        self._h2 = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        self._loop = asyncio.get_running_loop()
        self._streams: dict[int, CallStream] = {}
        self._flushing = False
        self._room = asyncio.Event()
        self._lost = "the connection has ended"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._h2.initiate_connection()
        self._h2.increment_flow_control_window(WINDOW)
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self._room.set()
        for stream in self._streams.values():
            stream.end(self._lost)
        self._streams.clear()

    def close(self) -> None:
        self._transport.close()

    async def call(self, request: bytes, clock: Callable[[], float]) -> CallStream:
        """Begins a call, as soon as the server lets this connection have another one."""
        stream = CallStream(clock)
        while not self._transport.is_closing():
            if self._h2.open_outbound_streams < self._h2.remote_settings.max_concurrent_streams:
                break
            self._room.clear()
            await self._room.wait()
        else:
            stream.end(self._lost)
            return stream
        number = self._h2.get_next_available_stream_id()
        self._streams[number] = stream
        self._h2.send_headers(number, HEADERS)
        self._h2.increment_flow_control_window(WINDOW, number)
        data = b"\0" + len(request).to_bytes(4) + request
        while data:
            room = min(self._h2.local_flow_control_window(number), self._h2.max_outbound_frame_size)
            if not room:
                self._room.clear()
                await self._room.wait()
                if number not in self._streams:
                    break
                continue
            piece, data = data[:room], data[room:]
            self._h2.send_data(number, piece, end_stream=not data)
        self._flush_soon()
        return stream

    def cancel(self, stream: CallStream) -> None:
        """The server need not go on with this call."""
        for number, known in list(self._streams.items()):
            if known is stream:
                del self._streams[number]
                self._h2.reset_stream(number, ErrorCodes.CANCEL)
                self._flush_soon()

    def data_received(self, data: bytes) -> None:
        try:
            for event in self._h2.receive_data(data):
                self._hear(event)
        except ProtocolError as error:
            self._lost = f"the server does not keep to HTTP/2: {error}"
            self._transport.abort()
            return
        self._flush_soon()

    def _hear(self, event: Event) -> None:
        match event:
            case DataReceived():
                if stream := self._streams.get(event.stream_id):
                    stream.came.append((stream.clock(), event.data))
            case ResponseReceived() | TrailersReceived():
                said = dict(event.headers or ())
                if said.get("grpc-status", "0") != "0" and (stream := self._streams.get(event.stream_id)):
                    stream.end(f"{grpc_name(said['grpc-status'])}: {said.get('grpc-message', '')}")
            case StreamEnded() | StreamReset():
                if stream := self._streams.pop(event.stream_id, None):
                    stream.end("" if isinstance(event, StreamEnded) else "the server has reset the stream")
                self._room.set()
            case _:  # a window, a setting
                self._room.set()

    def _flush_soon(self) -> None:
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        data = self._h2.data_to_send()
        if data and not self._transport.is_closing():
            self._transport.write(data)


def grpc_name(number: str) -> str:
    """The name of a status."""
    return next((code.name for code in grpc.StatusCode if str(code.value[0]) == number), number)  # type: ignore[index]
