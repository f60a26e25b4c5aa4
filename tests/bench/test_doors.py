"""The load's doors, against small servers that behave as a test says, and against answers that are known."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import grpc
import pytest
from listening import listening

from orca.v1 import orca_pb2 as pb
from orca.v1.orca_pb2_grpc import OrcaServicer, add_OrcaServicer_to_server
from orca_bench.cases import Request
from orca_bench.drive import closed_case, open_loop
from orca_bench.grpc_door import GrpcDoor
from orca_bench.load import load_of
from orca_bench.measures import Answer
from orca_bench.openai_door import OpenAIDoor, Piece, read_events, server_sent
from orca_common.errors import FailedPrecondition
from orca_lab.workload import Lengths
from orca_local.embedded_pool import keep_port

Serve = Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def http_server(serve: Serve) -> AsyncIterator[str]:
    """A server that knows one model, and answers completions by `serve`. Its URL."""

    async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().split("content-length:")[1].split()[0])
        body = await reader.readexactly(length)
        if head.startswith("GET /v1/models "):
            respond(writer, 200, json.dumps({"data": [{"id": "m"}]}).encode())
        else:
            assert head.startswith("POST /v1/completions ")
            await serve(json.loads(body), writer)
        writer.close()

    async with listening(exchange) as port:
        yield f"http://127.0.0.1:{port}"


def respond(writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
    writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)


def completion(tokens: int) -> bytes:
    """A stream of so many tokens, as vLLM writes it."""
    events: list[dict[str, Any]] = [
        {"choices": [{"text": "", "finish_reason": None if n + 1 < tokens else "length"}]} for n in range(tokens)
    ]
    events.append({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": tokens}})
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"


async def test_the_load_never_waits_for_the_server() -> None:
    """The server answers nobody until all requests are there: a client that waited for an answer would never end."""
    load = load_of(1000, 40, 1, Lengths((1, 9), (1, 5)))
    everybody, bodies = asyncio.Event(), list[dict[str, Any]]()

    async def serve(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        bodies.append(body)
        if len(bodies) == 1 + len(load):  # the door's own first request
            everybody.set()
        if len(bodies) > 1:
            await everybody.wait()
        respond(writer, 200, completion(body["max_tokens"]))

    async with http_server(serve) as url, OpenAIDoor(url) as door:
        answers = await open_loop(door, load)
    assert not [answer.error for answer in answers if answer.error]
    assert [answer.due for answer in answers] == [one.at for one in load]
    assert all(answer.sent >= answer.due for answer in answers)
    assert sorted(map(str, bodies[1:])) == sorted(
        str(
            {
                "model": "m",
                "prompt": one.request.prompt,
                "max_tokens": one.request.output,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
                "ignore_eos": True,
                "min_tokens": one.request.output,
            }
        )
        for one in load
    )


@pytest.mark.parametrize("known", [("ignore_eos", "min_tokens"), ("ignore_eos",), ("min_tokens",), ()])
async def test_it_asks_for_what_the_server_knows(known: tuple[str, ...]) -> None:
    async def serve(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if {"ignore_eos", "min_tokens"} & body.keys() <= set(known):
            respond(writer, 200, completion(body["max_tokens"]))
        else:
            respond(writer, 400, b'{"error": "unknown field"}')

    async with http_server(serve) as url, OpenAIDoor(url) as door:
        assert door.extensions == known
        [answer] = await closed_case(door, [Request([5], 3)])
        assert (answer.error, answer.tokens, len(answer.came)) == ("", 3, 2)


async def test_failures_are_counted_with_their_reasons() -> None:
    asked = 0

    async def serve(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        match body["prompt"]:
            case [7]:
                respond(writer, 429, b"full")
            case [8]:
                respond(writer, 200, completion(body["max_tokens"] - 1))
            case [9]:
                respond(writer, 200, b'data: {"error": {"message": "broke"}}\n\n')
            case [10]:
                writer.write(b"HTTP/1.1 200 X\r\nContent-Length: 100\r\n\r\ndata: ")
            case [11]:
                pass
            case [12]:
                writer.write(b"no HTTP\r\n\r\n")
            case _:
                respond(writer, 200, completion(body["max_tokens"]))

    case = [Request([n], 3) for n in (6, 7, 8, 9, 10, 11, 12)]
    async with http_server(serve) as url, OpenAIDoor(url) as door:
        answers = await closed_case(door, case)
    errors = [answer.error for answer in answers]
    assert errors[0] == ""
    assert errors[1] == "HTTP 429: full"
    assert errors[2] == "2 tokens came instead of 3"
    assert errors[3] == '{"message": "broke"}'
    assert errors[4] == errors[5] == "the connection ended before the answer"
    assert errors[6].startswith("HttpParser")
    assert asked == 8, "nothing is tried again"


async def test_a_server_that_never_answers_is_given_up() -> None:
    never = asyncio.Event()

    async def serve(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if body["prompt"] == [7]:
            await never.wait()
        respond(writer, 200, completion(body["max_tokens"]))

    async with http_server(serve) as url, OpenAIDoor(url) as door:
        answers = await closed_case(door, [Request([6], 1), Request([7], 1)], patience=0.5)
        never.set()
    assert [answer.error for answer in answers] == ["", "it had not ended after 0.5 s"]


async def test_a_server_that_refuses_is_told_at_the_start() -> None:
    async def serve(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        respond(writer, 503, b"starting")

    async with http_server(serve) as url:
        with pytest.raises(FailedPrecondition, match="refuses a completion: HTTP 503: starting"):
            await OpenAIDoor(url).__aenter__()
    with pytest.raises(FailedPrecondition, match="is not an address"):
        OpenAIDoor("https://example.org")


def read(*pieces: tuple[float, bytes]) -> Answer:
    answer = Answer(Request([1], 3), 0.0)
    read_events([Piece(*piece) for piece in pieces], answer)
    return answer


def test_an_event_has_the_moment_of_its_end() -> None:
    data = completion(3)
    middle = data.index(b"\n\n", data.index(b"\n\n") + 2) + 1  # within the end of the second event
    answer = read((1.0, data[:10]), (2.0, data[10:middle]), (3.0, data[middle:]))
    assert answer.came == [2.0, 3.0]  # the third event has no text, and only ends the choice
    assert answer.tokens == 3


def test_events_may_end_in_carriage_returns() -> None:
    data = b": ping\r\n\r\ndata: a\r\n\r\ndata: b\r\n\r\n"
    halves = [[Piece(1.0, data[:cut]), Piece(2.0, data[cut:])] for cut in range(len(data))]
    assert {tuple(event.data for event in server_sent(pieces)) for pieces in halves} == {(b"a", b"b")}


def test_a_stream_whose_tokens_have_no_text_has_its_end() -> None:
    end = b'data: {"choices": [{"text": "", "finish_reason": "length"}]}\n\n'
    usage = b'data: {"choices": [], "usage": {"completion_tokens": 3}}\n\n'
    assert read((5.0, end), (6.0, usage)).came == [5.0]


@contextmanager
def closing_server() -> Iterator[int]:
    """A server that closes each connection. Its port."""
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def close_next() -> None:
            connection, _ = listening.accept()
            connection.close()

        loop.add_reader(listening, close_next)
        yield listening.getsockname()[1]
        loop.remove_reader(listening)


async def test_no_server_there() -> None:
    closes = "does not answer .it closes the connection"
    with closing_server() as port, pytest.raises(FailedPrecondition, match=f"127.0.0.1:{port} {closes}"):
        await GrpcDoor(f"127.0.0.1:{port}").__aenter__()
    with keep_port() as kept:
        port = kept.getsockname()[1]
        nobody = f"^address: 127.0.0.1:{port} does not answer .nobody listens there.$"
        with pytest.raises(FailedPrecondition, match=nobody):
            await GrpcDoor(f"127.0.0.1:{port}").__aenter__()
        with pytest.raises(FailedPrecondition, match=f"^openai: 127.0.0.1:{port} does not answer .Connect"):
            await OpenAIDoor(f"127.0.0.1:{port}").__aenter__()


class Orca(OrcaServicer):
    """Servers of gRPC, whose calls end as soon as `before` has."""

    def __init__(self, before: Callable[[pb.GenerateRequest, Any], Awaitable[object]]) -> None:
        self._before = before

    async def GetModel(self, request: pb.GetModelRequest, context: object) -> pb.GetModelResponse:  # noqa: N802
        return pb.GetModelResponse(vocab_size=90)

    async def Generate(  # noqa: N802
        self, request: pb.GenerateRequest, context: object
    ) -> AsyncIterator[pb.GenerateResponse]:
        await self._before(request, context)
        for _ in range(5):
            yield pb.GenerateResponse()
        yield pb.GenerateResponse(finished=pb.Finished(output_tokens=request.max_new_tokens))

    @asynccontextmanager
    async def door(self, option: tuple[str, int]) -> AsyncIterator[GrpcDoor]:
        """A door to a server with this option of gRPC."""
        server = grpc.aio.server(options=[option])
        add_OrcaServicer_to_server(self, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with GrpcDoor(f"127.0.0.1:{port}") as door:
                yield door
        finally:
            await server.stop(None)


async def test_more_requests_than_the_server_takes_calls() -> None:
    """A server counts a call for a moment longer than its client. A call that it refuses for that is made again."""
    many_end_together = Orca(lambda request, context: asyncio.sleep(0.01))
    async with many_end_together.door(("grpc.max_concurrent_streams", 32)) as door:
        answers = await closed_case(door, [Request([1], 1)] * 800)
    assert [(answer.error, answer.tokens) for answer in answers] == [("", 1)] * 800


async def test_a_call_goes_on_when_its_connection_is_old() -> None:
    """The server tells each connection after a moment to take no more calls. The first call ends when the door has
    made one on another connection."""
    peers, moved = set[str](), asyncio.Event()

    async def before(request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        peers.add(context.peer())
        if request.max_new_tokens == 1:
            await moved.wait()

    async with Orca(before).door(("grpc.max_connection_age_ms", 100)) as door, asyncio.timeout(30):
        old = asyncio.ensure_future(closed_case(door, [Request([1], 1)]))
        while len(peers) < 2:
            [answer] = await closed_case(door, [Request([1], 2)])
            assert not answer.error
        moved.set()
        [answer] = await old
    assert (answer.error, answer.tokens) == ("", 1)


async def test_what_an_address_did_before_is_not_what_it_does_now() -> None:
    """A closed channel leaves its last failure to the next one, if that comes soon, unless each has its connections
    for itself."""
    for _ in range(50):
        with (
            closing_server() as port,
            pytest.raises(FailedPrecondition, match="it closes the connection"),
        ):
            await GrpcDoor(f"127.0.0.1:{port}").__aenter__()
        with keep_port(port), pytest.raises(FailedPrecondition, match="nobody listens there"):
            await GrpcDoor(f"127.0.0.1:{port}").__aenter__()
