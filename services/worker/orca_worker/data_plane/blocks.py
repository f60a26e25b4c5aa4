"""Blocks of keys and values between two engines: the rank that has them serves, the rank that goes on with them pulls.

A pull is one TCP connection, to the rank of the same place. It asks for the blocks of one row of one epoch, and shows
the secret of the process, which came by way of the schedulers. The answer is a refusal, or each block behind its key
and a checksum of both. The side that pulls compares the keys with those of its own tokens: nothing here is believed.

A connection is no part of an epoch: a peer that dies or stands still costs this transfer and no more. Like all of
the data plane it is not encrypted. This module imports no torch.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple
from zlib import crc32

from orca_common.address import split_address
from orca_common.errors import FailedPrecondition, Unavailable

log = logging.getLogger(__name__)

SECRET = 16  # bytes
STALL = 2.0  # seconds without a byte, until a transfer is given up
LONGEST = 10.0  # seconds of a transfer
GREETING = 1.0  # seconds, until a connection has shown the secret and said what it asks for
MOST = 64  # transfers at a time
MOST_STRANGERS = 256  # connections at a time that have not shown the secret yet
MOST_TEXT = 1024  # bytes of a layout, or of a refusal
# What is asked: secret, epoch, row, claim, positions, bytes of the layout, which follows.
ASKED = struct.Struct(f"<{SECRET}sQIQIH")
REFUSED, SERVED = 0, 1
ANSWER = struct.Struct("<BH")  # one of these, bytes of the refusal, which follows
BLOCK = struct.Struct("<16sII")  # key, bytes, checksum; the bytes follow


class Asked(NamedTuple):
    """Blocks of a row that an engine has handed over."""

    epoch: int
    row: int
    claim: int
    positions: int  # whose keys and values are asked for
    layout: str  # of a block in memory


class Block(NamedTuple):
    """Keys and values of some tokens, and the key of these tokens."""

    key: bytes
    payload: bytes | bytearray


class BlockServer:
    """Serves blocks on a free port, each connection in a thread of its own. `read` raises FailedPrecondition where a
    row is not, or no longer, what was asked for. It may be called in several threads."""

    def __init__(self, listen_on: str, read: Callable[[Asked], Iterator[Block]]) -> None:
        family, *_, address = socket.getaddrinfo(listen_on, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self._listening = socket.create_server(address[:2], family=family, backlog=MOST_STRANGERS)
        self.port: int = self._listening.getsockname()[1]
        self.secret = secrets.token_bytes(SECRET)
        self._read = read
        self._transfers, self._strangers = threading.Semaphore(MOST), threading.Semaphore(MOST_STRANGERS)
        threading.Thread(target=self._accept, name="blocks", daemon=True).start()

    def close(self) -> None:
        """Takes no more connections."""
        # `close` alone would leave the thread in `accept`.
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            if not self._strangers.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._serve, args=[connection], name="blocks-of", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                asked = self._greeted(connection)
                if asked is None or not self._transfers.acquire(blocking=False):
                    return
                try:
                    connection.settimeout(STALL)
                    self._answer(connection, asked)
                finally:
                    self._transfers.release()
            except (OSError, Unavailable, UnicodeDecodeError) as error:
                log.info("blocks were not taken: %s", error)

    def _greeted(self, connection: socket.socket) -> Asked | None:
        """Reads the question of a connection. None: it does not know the secret. Raises OSError, Unavailable,
        UnicodeDecodeError."""
        try:
            connection.settimeout(GREETING)
            until = time.monotonic() + GREETING
            secret, epoch, row, claim, positions, size = ASKED.unpack(receive(connection, ASKED.size, until))
            if not hmac.compare_digest(secret, self.secret) or size > MOST_TEXT:
                return None
            return Asked(epoch, row, claim, positions, receive(connection, size, until).decode())
        finally:
            self._strangers.release()

    def _answer(self, connection: socket.socket, asked: Asked) -> None:
        begun = False
        try:
            for key, payload in self._read(asked):
                if not begun:
                    connection.sendall(ANSWER.pack(SERVED, 0))
                    begun = True
                connection.sendall(BLOCK.pack(key, len(payload), crc32(payload, crc32(key))))
                connection.sendall(payload)
        except FailedPrecondition as error:
            log.warning("blocks are not served: %s", error, extra={"row": asked.row, "claim": asked.claim})
            if not begun:  # else the end of the connection says it
                why = str(error).encode()[:MOST_TEXT]
                connection.sendall(ANSWER.pack(REFUSED, len(why)) + why)


def pull(address: str, secret: bytes, asked: Asked, count: int, size: int) -> Iterator[Block]:
    """The `count` blocks, of `size` bytes each, as they come. Raises OrcaError, or OSError.

    Nothing is believed but that a block came as it was sent.
    """
    until = time.monotonic() + LONGEST
    if len(secret) != SECRET:
        raise FailedPrecondition(f"a secret of {len(secret)} bytes")
    layout = asked.layout.encode()
    with socket.create_connection(split_address(address), STALL) as connection:
        connection.settimeout(STALL)
        connection.sendall(ASKED.pack(secret, *asked[:-1], len(layout)) + layout)
        served, length = ANSWER.unpack(receive(connection, ANSWER.size, until))
        if served != SERVED:
            raise FailedPrecondition(receive(connection, min(length, MOST_TEXT), until).decode(errors="replace"))
        for n in range(count):
            key, length, checksum = BLOCK.unpack(receive(connection, BLOCK.size, until))
            if length != size:
                raise Unavailable(f"block {n} has {length} bytes, not {size}")
            payload = receive(connection, size, until)
            if crc32(payload, crc32(key)) != checksum:
                raise Unavailable(f"block {n} is not as it was sent")
            yield Block(key, payload)


def receive(connection: socket.socket, size: int, until: float) -> bytearray:
    """The next `size` bytes. Raises OSError, and Unavailable where the connection ends before, or when it is
    late: at `until`, by `time.monotonic`."""
    data = bytearray(size)
    view, got = memoryview(data), 0
    while got < size:
        if time.monotonic() > until:
            raise Unavailable("it took too long")
        more = connection.recv_into(view[got:])
        if not more:
            raise Unavailable("the connection ended before all was there")
        got += more
    return data
