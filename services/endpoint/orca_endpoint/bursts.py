"""Messages that are written in one turn of the loop to one connection leave together.

An iteration brings a token to each stream of a client. grpc.aio sends each message by itself: a system call, a way
through the network's code, and a wake-up of the client. TCP_CORK holds back what is written until it is taken off, so a
client of 32 streams wakes up once an iteration. Beside kernels that keep the same two cores busy it then took 1.5 ms of
CPU time an iteration instead of 2.0. The kernel ends a hold by itself after 0.2 s.
"""

import asyncio
import os
import socket
import stat
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import unquote

FEW = 4  # streams of a connection from which on its messages are gathered: below that it saves nothing
POLLER = "_poll_wrapper"  # in the name of grpc.aio's thread
MOST = 64  # connections that are gathered at the same time: each takes a descriptor


class Connection:
    """The streams of one client's connection. Messages are gathered once there are `FEW` of them."""

    def __init__(self) -> None:
        self.streams = 0
        self.socket: socket.socket | None = None
        self._held = False

    def gather(self) -> None:
        """What is written from now on, until all that is ready to run in the loop has run, leaves together."""
        if self.socket is not None and not self._held:
            self._cork(True)
            asyncio.get_running_loop().call_soon(self._cork, False)

    def close(self) -> None:
        if self.socket is not None:
            self.socket.close()
            self.socket = None

    def _cork(self, held: bool) -> None:
        self._held = held
        if self.socket is not None:
            with suppress(OSError):  # the client has left
                self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, held)


class Bursts:
    """The connections of one port that have streams."""

    def __init__(self) -> None:
        self.port = 0
        self._connections: dict[str, Connection] = {}
        self._gathered = 0

    @property
    def streams(self) -> int:
        return sum(connection.streams for connection in self._connections.values())

    @contextmanager
    def stream(self, peer: str) -> Generator[Connection]:
        """One stream of a client, until the block ends. peer: as gRPC writes it."""
        connection = self._connections.setdefault(peer, Connection())
        connection.streams += 1
        if connection.streams == FEW and connection.socket is None and self._gathered < MOST:
            connection.socket = self._socket_of(peer)
            self._gathered += connection.socket is not None
        try:
            yield connection
        finally:
            connection.streams -= 1
            if not connection.streams:
                self._gathered -= connection.socket is not None
                connection.close()
                del self._connections[peer]

    def _socket_of(self, peer: str) -> socket.socket | None:
        """The connection of a peer by a descriptor of our own. None where the system does not tell it."""
        host, _, port = unquote(peer).partition(":")[2].rpartition(":")
        for connection in accepted(self.port):
            with suppress(OSError):
                at, number, *_ = connection.getpeername()
                if str(number) == port and at.removeprefix("::ffff:") == host.strip("[]"):
                    # Not `connection.dup()`: it sets a timeout, and gRPC's descriptor would block from then on.
                    return socket.socket(fileno=os.dup(connection.fileno()))
        return None


def calm_poller() -> None:
    """Lets grpc.aio's thread, which wakes the loop after each message that was written, wait while the loop runs.

    Otherwise the kernel gives it the loop's core at once, 47 times an iteration of 32 streams. As a batch thread it
    comes when the core is free: 2.8 ms of the endpoint's CPU time an iteration instead of 3.1.
    """
    for thread in threading.enumerate():
        if POLLER in thread.name and thread.native_id is not None and hasattr(os, "SCHED_BATCH"):
            with suppress(OSError):  # not allowed here
                os.sched_setscheduler(thread.native_id, os.SCHED_BATCH, os.sched_param(0))


def accepted(port: int) -> Iterator[socket.socket]:
    """The sockets of this process that stand at a port, among them the connections that gRPC has accepted: it does not
    tell them. Each is open until the next one is asked for."""
    descriptors = Path("/proc/self/fd")
    for name in os.listdir(descriptors) if descriptors.exists() else ():
        with suppress(OSError):
            if not stat.S_ISSOCK(os.stat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                inet = connection.family in (socket.AF_INET, socket.AF_INET6)
                if inet and connection.getsockname()[1] == port:
                    yield connection
