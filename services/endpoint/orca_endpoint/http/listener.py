"""Accepts a door's connections: each is counted before it says anything, and a TLS handshake has an end.

Other servers, uvicorn's and asyncio's, count a connection of TLS only after its handshake, for which asyncio gives it a
minute. So a stranger could hold descriptors that no limit counts.
"""

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable
from functools import partial

from orca_common.address import join_address
from orca_common.service import cancel
from orca_common.tls import peer_of_handshake

from .connection import ConnectionLimits, Place, refusal

AT_ONCE = 64  # connections that are accepted before others have their turn on the loop
NO_MEANS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)  # no descriptor is left, or no memory
PAUSE_SECONDS = 0.5  # after one of these, which would come again at once
HELLO = b"\x16"  # the first byte of a TLS handshake
FAILED = "a TLS handshake failed"
PLAIN = "this port speaks TLS; call it with https://"

log = logging.getLogger(__name__)


class Listener:
    """A listening socket, and the connections that were accepted but are not yet made."""

    def __init__(
        self,
        listening: socket.socket,
        limits: ConnectionLimits,
        make: Callable[[Place], asyncio.Protocol],
        context: ssl.SSLContext | None,
    ) -> None:
        """Accepts at once. make: the protocol of a connection that has this place. context: None for plaintext."""
        self._socket, self._limits, self._make, self._context = listening, limits, make, context
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        listening.setblocking(False)
        self._listen()

    def _listen(self) -> None:
        self._loop.add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            try:
                connection, address = self._socket.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in NO_MEANS:
                    continue  # of this connection alone: its client has left, or a firewall refuses it
                log.error("no connection can be accepted", extra={"error": str(error)})
                self._loop.remove_reader(self._socket)
                self._pause = self._loop.call_later(PAUSE_SECONDS, self._listen)
                return
            place = self._limits.take(str(address[0]))
            if place is None:
                connection.close()
                continue
            task = self._loop.create_task(self._connect(connection, place, join_address(*address[:2])))
            self._tasks.add(task)
            task.add_done_callback(partial(self._connected, connection, place))

    async def _connect(self, connection: socket.socket, place: Place, peer: str) -> None:
        """Makes the connection, by TLS after its handshake. Raises OSError when that fails or takes too long."""
        made = partial(self._make, place)
        if self._context is None:
            await self._loop.connect_accepted_socket(made, connection)
            return
        seconds = self._limits.header_seconds
        async with asyncio.timeout(seconds) as bound:
            if await self._first_byte(connection) not in (b"", HELLO):
                await self._loop.sock_sendall(connection, refusal(400, PLAIN))
                connection.recv(self._limits.header_bytes)  # what is unread would reset the connection
                log.info(FAILED, extra={"peer": peer, "error": PLAIN})
                raise ConnectionAbortedError(PLAIN)
            left = (bound.when() or 0.0) - self._loop.time()
        peer_of_handshake.set(peer)
        await self._loop.connect_accepted_socket(
            made,
            connection,
            ssl=self._context,
            ssl_handshake_timeout=max(left, 0.001),
            ssl_shutdown_timeout=seconds,
        )

    async def _first_byte(self, connection: socket.socket) -> bytes:
        """Peeks at the client's first bytes, which stay to be read. Empty: it has left."""
        connection.setblocking(False)
        came = asyncio.Event()
        self._loop.add_reader(connection, came.set)
        try:
            await came.wait()
        finally:
            self._loop.remove_reader(connection)
        return connection.recv(1, socket.MSG_PEEK)

    def _connected(self, connection: socket.socket, place: Place, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is None and not task.cancelled():
            return  # the protocol leaves the place
        place.leave()
        connection.close()
        if isinstance(error, OSError):  # among them ssl.SSLError: the client's fault, or its end
            log.debug("a handshake failed: %s", error)
        elif error is not None:
            log.error("a connection could not be made", exc_info=error)

    async def close(self) -> None:
        """Accepts nothing more, and ends the handshakes. Connections that are made go on."""
        if self._pause is not None:
            self._pause.cancel()
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
        self._socket.close()
        await cancel(*self._tasks)
