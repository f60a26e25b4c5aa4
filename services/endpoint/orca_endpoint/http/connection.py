"""One HTTP connection, guarded: uvicorn's protocol with bounds on what a client may send, and on how long it may take.

uvicorn itself bounds none of this. A client that is refused here gets a short answer, and its connection is closed.
"""

import asyncio
import json
import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from orca_common.address import join_address
from orca_common.errors import InvalidArgument

from .errors import failure

PIPELINED = 16  # requests that a client may send ahead on one connection


@dataclass(kw_only=True)
class ConnectionLimits:
    """The bounds of all connections, and how many there are."""

    connections: int  # in all
    peer_connections: int  # of one host
    header_bytes: int  # of one request: its line and its header
    # For a whole header, from its first byte or from the connection's begin; before it for a TLS handshake, and at the
    # end for the client to close TLS.
    header_seconds: float
    body_seconds: float  # for a whole body
    write_timeout: float  # for a client to read something of what is written
    peers: Counter[str] = field(default_factory=Counter)

    def take(self, peer: str) -> "Place | None":
        """The place of one connection more of a peer; None when the peer, or all together, have too many."""
        if self.peers.get(peer, 0) >= self.peer_connections or self.peers.total() >= self.connections:
            return None
        return Place(self, peer)


class Place:
    """One connection's share of the limits."""

    def __init__(self, limits: ConnectionLimits, peer: str) -> None:
        self._limits, self._peer, self._held = limits, peer, True
        limits.peers[peer] += 1

    def leave(self) -> None:
        """The connection has ended. Once or more often."""
        if self._held:
            self._held = False
            self._limits.peers[self._peer] -= 1
            if not self._limits.peers[self._peer]:
                del self._limits.peers[self._peer]


class PeerLogger(logging.LoggerAdapter[logging.Logger]):
    """uvicorn's logger, whose lines name the client of one connection."""

    @property
    def level(self) -> int:
        """uvicorn asks for it."""
        return self.logger.level


def refusal(status: int, sentence: str) -> bytes:
    """An answer that closes its connection: an error in OpenAI's shape."""
    body = json.dumps(failure(InvalidArgument("request", sentence))[2]).encode()
    head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    return STATUS_LINE[status] + head.encode() + body


class GuardedConnection(HttpToolsProtocol):
    """uvicorn's protocol for one connection, within `ConnectionLimits`."""

    def __init__(self, *arguments: Any, limits: ConnectionLimits, place: Place, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._limits, self._place = limits, place
        self._head: int | None = 0  # bytes of the header that is being read; None: a header is complete
        self._reading: asyncio.TimerHandle | None = None  # bounds the header or the body
        self._writing: asyncio.TimerHandle | None = None
        self._unwritten = 0  # bytes that were not written when `_writing` was set

    # -- connections
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        peer = join_address(*self.client) if self.client is not None else ""
        self.logger = PeerLogger(self.logger, {"peer": peer})  # type: ignore[assignment]
        self._await(self._limits.header_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self._place.leave()
        for timer in (self._reading, self._writing):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    # -- what comes in
    def data_received(self, data: bytes) -> None:
        """Feeds the parser, and no more of a header than is allowed."""
        if self._head == 0:
            self._await(self._limits.header_seconds)
        while data and self._head is not None and not self.transport.is_closing():
            room = self._limits.header_bytes - self._head
            if room <= 0:
                self._refuse(431, f"the header has more than {self._limits.header_bytes} bytes")
                return
            piece, data = data[:room], data[room:]
            self._head += len(piece)
            super().data_received(piece)
        if data and not self.transport.is_closing():
            super().data_received(data)

    def on_headers_complete(self) -> None:
        self._head = None
        self._await(self._limits.body_seconds)
        super().on_headers_complete()
        if len(self.pipeline) > PIPELINED:
            self.transport.abort()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._head = 0
        if self._reading is not None:
            self._reading.cancel()

    def _await(self, seconds: float) -> None:
        """Gives the client these seconds to send its next part."""
        if self._reading is not None:
            self._reading.cancel()
        self._reading = self.loop.call_later(seconds, self._too_slow, seconds)

    def _too_slow(self, seconds: float) -> None:
        if self.flow.read_paused:  # by us
            self._await(seconds)
        elif self._head is not None:
            self._refuse(408, f"the header did not come within {seconds:g} s")
        else:
            self._refuse(408, f"the body did not come within {seconds:g} s")

    def _refuse(self, status: int, sentence: str) -> None:
        """Answers with the reason, unless an answer has begun, and closes the connection."""
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            self.transport.write(refusal(status, sentence))
        self.transport.close()
        self._watch()

    def _unsupported_upgrade_warning(self) -> None:
        """Logs nothing of a client that asks for a WebSocket: uvicorn would name packages to install. Its request is
        answered like any other."""

    # -- what goes out
    def send_400_response(self, msg: str) -> None:
        """Answers bytes that are no HTTP; uvicorn would answer in plain text."""
        self._refuse(400, msg)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def _watch(self) -> None:
        """Looks again after `write_timeout` whether the client has read anything."""
        self._unwritten = self.transport.get_write_buffer_size()
        if self._writing is not None:
            self._writing.cancel()
        self._writing = self.loop.call_later(self._limits.write_timeout, self._look) if self._unwritten else None

    def _look(self) -> None:
        self._writing = None
        if self.transport.get_write_buffer_size() >= self._unwritten:
            self.transport.abort()  # its calls hear that their client is gone
        else:
            self._watch()
