"""The server of the lanes: it runs the method of each call, and sends its answer or its error."""

import asyncio
from base64 import b64encode
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar
from urllib.parse import quote

from google.protobuf.message import DecodeError, Message
from h2.errors import ErrorCodes

from ..errors import OrcaError, Unavailable, Unimplemented, unreadable
from ..listening import listen
from ..roles import Role, check_role, dns_names, roles_in
from ..statuses import internal, status_of
from ..tls import Transport
from .call import Call, Unreadable
from .connection import Connection

M = TypeVar("M", bound=Message)
BEGIN = ((":status", "200"), ("content-type", "application/grpc"))
PLAIN = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")  # of a status's sentence, as it may be written
HANDSHAKE_SECONDS = 10.0  # of TLS


class LaneCall(Call):
    """The server's side of a call."""

    def __init__(self, connection: Connection, number: int, fields: Mapping[str, str]) -> None:
        super().__init__(connection, number)
        self.path, self.metadata = fields.get(":path", ""), fields
        self._began = self._heard_all = False
        self._unreadable: OrcaError | None = None  # why what came cannot be read
        self._trailers: tuple[tuple[str, str], ...] | None = None
        self._waiting: list[bytes] = []  # messages that came before there was a hearer
        self._hearer: tuple[Callable[[bytes], None], Callable[[OrcaError | None], None]] | None = None
        self.task: asyncio.Task[None] | None = None  # that serves it

    def check_role(self, allowed: Mapping[str, frozenset[Role]]) -> None:
        """Raises PermissionDenied for a client whose certificate has none of the method's roles."""
        secure = self._connection.secure
        if secure is not None:
            check_role(self.path, allowed, roles_in(dns_names(secure.getpeercert())))

    def listen(self, heard: Callable[[bytes], None], ended: Callable[[OrcaError | None], None]) -> None:
        """Hands each message to `heard` in the turn of the loop in which it comes.

        `ended` is told when there are no more, or why they cannot be read.
        """
        self._hearer = heard, ended
        waiting, self._waiting = self._waiting, []
        for message in waiting:
            heard(message)
        if self._heard_all:
            ended(self._unreadable)

    async def only(self) -> bytes:
        """The one message of a call. Raises InvalidArgument."""
        over: asyncio.Future[OrcaError | None] = asyncio.get_running_loop().create_future()
        came: list[bytes] = []
        self.listen(came.append, over.set_result)
        if (error := await over) is not None:
            raise error
        if len(came) != 1:
            raise unreadable(f"{len(came)} came; this method takes one")
        return came[0]

    def begin(self) -> None:
        """Tells the client that its call is taken, before there is a message."""
        if not self._began and not self.gone:
            self._began = True
            self._connection.send_headers(self._number, BEGIN)

    def send(self, message: bytes) -> None:
        """Sends a message without waiting. Sends nothing after the end.

        Ends the call when the client has not taken MAX_UNSENT bytes of earlier messages.
        """
        if self.overfull():
            self._unsent.clear()
            self.end(Unavailable("the client takes nothing"))
        elif not self.gone and self._trailers is None:
            self.begin()
            self.put(message)

    def end(self, error: OrcaError | None = None) -> None:
        """Ends the call after what was sent, with the error's status; OK without one. The first end counts."""
        if not self.gone and self._trailers is None:
            self._trailers = (("grpc-status", "0"),) if error is None else trailers_of(error)
            self.room()

    # -- for the connection
    def room(self) -> None:
        super().room()
        if self._trailers is not None and not self._unsent and not self.gone:
            self.gone = True
            headers = self._trailers if self._began else (*BEGIN, *self._trailers)
            self._connection.send_headers(self._number, headers, last=True)
            self._connection.forget(self._number, ErrorCodes.NO_ERROR)

    def headers(self, fields: dict[str, str]) -> None:
        pass  # a client's trailers say nothing

    def data(self, data: bytes) -> None:
        if self._heard_all:
            return
        try:
            for message in self.messages(data):
                if self._hearer is None:
                    self._waiting.append(message)
                else:
                    self._hearer[0](message)
        except Unreadable as error:
            self._hear_end(unreadable(str(error)))

    def ended(self) -> None:
        if not self._heard_all:
            self._hear_end(unreadable("ends in its middle") if self._came else None)

    def _hear_end(self, error: OrcaError | None) -> None:
        self._heard_all, self._unreadable = True, error
        if self._hearer is not None:
            self._hearer[1](error)

    def lost(self, why: str, code: int | None = None) -> None:
        self.gone = True
        if self.task is not None:
            self.task.cancel()


Method = Callable[[LaneCall], Awaitable[bytes | None]]  # reads its request; what it returns is sent
Methods = Mapping[str, Method]  # by their paths


class LaneServer:
    """Serves methods to the engine's own."""

    def __init__(
        self, methods: Methods, transport: Transport, allowed: Mapping[str, frozenset[Role]], leaving: Unavailable
    ) -> None:
        """allowed: the roles that may call each method, where clients have certificates.
        leaving: ends calls that outlast a stop's grace."""
        self._methods, self._allowed, self._leaving = methods, allowed, leaving
        self._context = transport.server_context()
        self._connections: set[Connection] = set()
        self._calls: set[asyncio.Task[None]] = set()
        self._listening: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Listens on a port (0: a free one) that a process of ours keeps, and returns it.

        Raises Unavailable when it cannot be had.
        """
        listening = listen("port", host, port, shared=True)
        self._listening = await asyncio.get_running_loop().create_server(
            lambda: Connection(self._begin, self._connections),
            sock=listening,
            ssl=self._context,
            ssl_handshake_timeout=HANDSHAKE_SECONDS if self._context is not None else None,
        )
        return listening.getsockname()[1]

    def _begin(self, connection: Connection, number: int, fields: dict[str, str]) -> LaneCall:
        call = LaneCall(connection, number, fields)
        call.task = asyncio.get_running_loop().create_task(self._serve(call))
        self._calls.add(call.task)
        call.task.add_done_callback(self._calls.discard)
        return call

    async def _serve(self, call: LaneCall) -> None:
        """Runs a call to its end, and answers what it raises: an OrcaError by its status, anything else INTERNAL."""
        try:
            method = self._methods.get(call.path)
            if method is None:
                raise Unimplemented(f"{call.path[:200]}: is no method of this server")
            call.check_role(self._allowed)
            answer = await method(call)
            if answer is not None:
                call.send(answer)
            call.end()
        except asyncio.CancelledError:
            call.end(self._leaving)
        except OrcaError as error:
            call.end(error)
        except Exception as error:
            call.end(internal(error))

    async def stop(self, grace: float) -> None:
        """Accepts nothing more, and ends the calls that are left after `grace` seconds."""
        if self._listening is not None:
            self._listening.close()
        if self._calls:
            await asyncio.wait(self._calls, timeout=grace)
        for task in self._calls:
            task.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        for connection in list(self._connections):
            connection.close()


def unary(kind: type[M], method: Callable[[M], Awaitable[Message]]) -> Method:
    """A method of one message each way."""

    async def serve(call: LaneCall) -> bytes:
        return (await method(parsed(kind, await call.only()))).SerializeToString()

    return serve


def parsed(kind: type[M], raw: bytes) -> M:
    """A message that has come. Raises InvalidArgument when it cannot be parsed."""
    try:
        return kind.FromString(raw)
    except DecodeError:
        raise unreadable(f"not a valid {kind.DESCRIPTOR.name} (text fields must be UTF-8)") from None


def trailers_of(error: OrcaError) -> tuple[tuple[str, str], ...]:
    """An error as gRPC's trailers: its status, its sentence, and what a program can read."""
    status = status_of(error)
    return (
        ("grpc-status", str(status.code)),
        ("grpc-message", quote(str(error), safe=PLAIN)),
        ("grpc-status-details-bin", b64encode(status.SerializeToString()).rstrip(b"=").decode()),
    )
