"""The server side of client tests: endpoints that play a script, a wire to cut, and one face for both clients."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from orca.v1 import orca_pb2 as pb
from orca.v1.orca_pb2_grpc import OrcaServicer, add_OrcaServicer_to_server
from orca_client import AsyncOrcaClient, Event, OrcaClient, Token
from orca_common import errors
from orca_common.statuses import abort

IDS = [100, 7, 4_294_967_295, 0, 50_256, 9]  # the token ids of the one request that all scripts are about
End = Literal["finish", "hang", "die", "return", "raise", "internal"] | errors.OrcaError


@dataclass(frozen=True)
class Act:
    """The answer to one call: Accepted, the tokens asked for below index `upto`, then how the call ends."""

    upto: int = 0
    end: End = "hang"
    accept: bool = True
    first: int | None = None  # index of the first token, if it is not the one asked for
    ids: Sequence[int] = tuple(IDS)
    text: str = ""  # of each token and of the end, if it is not its own


FINISH = Act(len(IDS), "finish")


@dataclass(frozen=True)
class Seen:
    """A call as an endpoint saw it."""

    endpoint: str
    request: Any
    remaining: float | None  # seconds to its deadline
    metadata: dict[str, Any]


class Script:
    """Answers the calls in their order, whichever endpoint they reach. After the last act, every call gets FINISH."""

    def __init__(self, *acts: Act) -> None:
        self.acts = deque(acts)
        self.calls: list[Seen] = []
        self.cancelled: list[str] = []  # request ids of Cancel
        self.refuses: errors.OrcaError | None = None  # what GetModel answers, as one does to a wrong key
        self.has_chat_template, self.sampling = False, pb.Sampling()  # of the model
        self.said = asyncio.Queue[str]()  # endpoints whose call has sent all its events, and hangs
        self.left = asyncio.Queue[str]()  # endpoints whose hanging call its client has ended


class Endpoint(OrcaServicer):
    """One server that plays a script."""

    def __init__(self, name: str, script: Script, port: int = 0) -> None:
        self.name, self.script = name, script
        self.server = grpc.aio.server(options=[("grpc.http2.min_ping_interval_without_data_ms", 10)])
        add_OrcaServicer_to_server(self, self.server)
        port = self.server.add_insecure_port(f"127.0.0.1:{port}")
        self.address = f"127.0.0.1:{port}"
        self.ending: asyncio.Task[None] | None = None

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:  # noqa: N802
        async for response in self._play(request, 0, context):
            yield response

    async def Resume(self, request: pb.ResumeRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:  # noqa: N802
        async for response in self._play(request, request.from_index, context):
            yield response

    async def Cancel(self, request: pb.CancelRequest, context: Any) -> pb.CancelResponse:  # noqa: N802
        self.script.cancelled.append(request.request_id)
        if request.request_id == "unknown":
            await abort(context, errors.NotFound("request unknown is not known"))
        return pb.CancelResponse(alive=True)

    async def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.GetModelResponse:  # noqa: N802
        if self.script.refuses is not None:
            await abort(context, self.script.refuses)
        engine = pb.Engine(id="engine-0", tensor_parallel=2, pipeline_parallel=1, slots=640, epoch=3, weights="0af7")
        return pb.GetModelResponse(
            name="demo",
            vocab_size=512,
            eos_token_ids=[1, 2],
            has_tokenizer=True,
            engines=[engine],
            has_chat_template=self.script.has_chat_template,
            sampling_defaults=self.script.sampling,
        )

    async def _play(self, request: Any, asked: int, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        script = self.script
        copy = type(request)()
        copy.CopyFrom(request)
        script.calls.append(Seen(self.name, copy, context.time_remaining(), dict(context.invocation_metadata())))
        act = script.acts.popleft() if script.acts else FINISH
        if act.accept:
            accepted = pb.Accepted(request_id=request.request_id, input_tokens=3, queue_position=1)
            yield pb.GenerateResponse(accepted=accepted)
        first = asked if act.first is None else act.first
        for index in range(first, act.upto):
            message = token(index, act.ids[index])
            message.text = act.text or message.text
            yield pb.GenerateResponse(tokens=[message])
        match act.end:
            case "finish":
                timings = pb.Timings(
                    claimed=Duration(nanos=500_000_000), first_token=Duration(seconds=1), finished=Duration(seconds=2)
                )
                reason = pb.FINISH_REASON_CANCELLED if script.cancelled else pb.FINISH_REASON_LENGTH
                end = pb.Finished(reason=reason, output_tokens=act.upto, text=act.text or "!", timings=timings)
                yield pb.GenerateResponse(finished=end)
            case "hang":
                await self._hang()
            case "die":
                self.ending = asyncio.create_task(self.server.stop(0))
                await self._hang()
            case "raise":
                raise ZeroDivisionError("a bug")
            case "internal":
                await context.abort(grpc.StatusCode.INTERNAL, "Received RST_STREAM with error code 2")
            case errors.OrcaError() as error:
                await abort(context, error)

    async def _hang(self) -> None:
        self.script.said.put_nowait(self.name)
        try:
            await asyncio.Event().wait()
        finally:
            self.script.left.put_nowait(self.name)


def token(index: int, token_id: int) -> pb.Token:
    return pb.Token(
        index=index, token_id=token_id, text=f" w{index}", logprob=-0.5, iteration=10 + index, engine="engine-0"
    )


def without_attempt(request: Message) -> Message:
    copy = type(request)()
    copy.CopyFrom(request)
    copy.ClearField("attempt")
    return copy


def indexes(events: Sequence[Event]) -> list[int]:
    return [event.index for event in events if isinstance(event, Token)]


class Wire:
    """A TCP proxy before an endpoint. It can do to a connection what a network, a SIGKILL or a SIGSTOP does."""

    def __init__(self, address: str) -> None:
        self._host, port = address.rsplit(":", 1)
        self._port = int(port)
        self._writers: set[asyncio.StreamWriter] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._server: asyncio.Server | None = None
        self.closes = 0  # so many more connections are closed at once, as by an endpoint that has its `max_connections`

    async def open(self) -> str:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        """Resets every connection."""
        for writer in self._writers:
            writer.transport.abort()

    def freeze(self) -> None:
        """Stops passing bytes on, without closing anything."""
        self._flowing.clear()

    async def close(self) -> None:
        self._flowing.set()
        self.cut()
        if self._server is not None:
            self._server.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.closes:
            self.closes -= 1
            writer.transport.abort()
            return
        self._writers.add(writer)
        there, back = await asyncio.open_connection(self._host, self._port)
        self._writers.add(back)
        await asyncio.gather(self._pump(reader, back), self._pump(there, writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                await self._flowing.wait()
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.transport.abort()


class Threads:
    """Calls OrcaClient, each time in a thread of its own."""

    kind = OrcaClient

    async def run(self, method: Any, *args: Any, **named: Any) -> Any:
        return await asyncio.to_thread(method, *args, **named)

    async def next(self, stream: Any) -> Event | None:
        """The next event; None at the end."""
        return await asyncio.to_thread(next, stream, None)


class Asyncio:
    """Calls AsyncOrcaClient, in the test's loop."""

    kind = AsyncOrcaClient

    async def run(self, method: Any, *args: Any, **named: Any) -> Any:
        return await method(*args, **named)

    async def next(self, stream: Any) -> Event | None:
        """The next event; None at the end."""
        return await anext(stream, None)


Face = Threads | Asyncio


async def rest(face: Face, stream: Any) -> list[Event]:
    """All events up to the end of the stream."""
    events: list[Event] = []
    while (event := await face.next(stream)) is not None:
        events.append(event)
    return events


async def take(face: Face, stream: Any, count: int) -> list[Event]:
    """The next `count` events."""
    events: list[Event] = []
    while len(events) < count:
        event = await face.next(stream)
        assert event is not None
        events.append(event)
    return events
