"""A fork server, as its parent sees it: asked for processes, and replaced when it has died."""

import asyncio
import json
import logging
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from orca_common.backoff import Backoff

from .. import machine
from .beginning import Begun
from .process import adopting_orphans, exit_status, why_ended

log = logging.getLogger(__name__)

WARM = 120.0  # seconds for its imports: torch is read for the first time, perhaps from a slow file system
ANSWER = 10.0  # seconds for a fork, which takes some 20 ms
MESSAGE = 4096  # bytes of an answer


class Forked(NamedTuple):
    """A process that the fork server has made: a child of this one, which waits to be told what it needs to know."""

    pid: int
    input: int  # descriptor of the pipe to its standard input
    output: int  # descriptor of the pipe from its standard output


class ForkServerLost(Exception):
    """The fork server has ended."""


class ForkServer:
    """A process that imports `modules` and then forks others."""

    def __init__(self, begun: Begun, modules: Sequence[str], log_level: str, errors: int = 2) -> None:
        """errors: a descriptor, for what it prints itself."""
        self.pid, self._connection = begun
        self._loop = asyncio.get_running_loop()
        self._turn = asyncio.Lock()  # one question at a time
        self._is_warm = False
        self.ended: asyncio.Future[str] = self._loop.create_future()  # why, in words
        self._oom_kills = machine.kills()
        self._pidfd = os.pidfd_open(self.pid)
        self._loop.add_reader(self._pidfd, self._reap)
        self._connection.setblocking(False)
        self._loop.add_reader(self._connection, self._read)
        self._answer = self._ask({"modules": list(modules), "log_level": log_level}, errors)

    async def fork(self, errors: int = 2) -> Forked:
        """Makes a process, as soon as the imports are done, whose standard error is a descriptor of this one's.

        Raises ForkServerLost.
        """
        async with self._turn:
            if not self._is_warm:
                seconds = (await self._answered(WARM))["warm"]
                log.info("fork server is warm", extra={"fork_server_pid": self.pid, "seconds": seconds})
                self._is_warm = True
            reads, input = os.pipe()
            output, writes = os.pipe()
            try:
                with adopting_orphans():
                    self._answer = self._ask({}, reads, writes, errors)
                    os.close(reads)
                    os.close(writes)
                    return Forked((await self._answered(ANSWER))["pid"], input, output)
            except BaseException:
                self.kill()  # its answer would be taken for that to the next question
                os.close(input)  # a process that was forked all the same finds no settings, and ends
                os.close(output)
                raise

    def kill(self) -> None:
        """Ends the fork server; its processes live on. Closes the connection here: the loop may end before it reads the
        fork server's end."""
        if not self.ended.done():
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        self._close()

    def _ask(self, said: dict[str, Any], *descriptors: int) -> asyncio.Future[dict[str, Any] | None]:
        """Sends a question. The answer is None when the fork server ends; one that cannot be asked is killed."""
        answer = self._loop.create_future()
        try:
            socket.send_fds(self._connection, [json.dumps(said).encode()], descriptors)
        except OSError as error:
            log.warning("fork server cannot be asked", extra={"fork_server_pid": self.pid, "why": str(error)})
            answer.set_result(None)
            self.kill()
        return answer

    async def _answered(self, seconds: float) -> dict[str, Any]:
        try:
            async with asyncio.timeout(seconds):
                answer = await asyncio.shield(self._answer)
                if answer is None:
                    raise ForkServerLost(f"the fork server: {await asyncio.shield(self.ended)}")
                return answer
        except TimeoutError:
            self.kill()
            raise ForkServerLost(f"the fork server did not answer within {seconds:g} s") from None

    def _read(self) -> None:
        try:
            said = self._connection.recv(MESSAGE)
        except OSError:
            said = b""
        if not said:
            self._close()
        elif not self._answer.done():
            self._answer.set_result(json.loads(said))

    def _reap(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self._close()
        why = why_ended(exit_status(self.pid), out_of_memory=machine.kills() > self._oom_kills)
        os.close(self._pidfd)
        if not self._answer.done():
            self._answer.set_result(None)
        self.ended.set_result(why)

    def _close(self) -> None:
        if self._connection.fileno() >= 0:
            self._loop.remove_reader(self._connection)
            self._connection.close()


class Forks:
    """Keeps a fork server, and forks by it."""

    def __init__(
        self,
        begin: Callable[[], Begun],
        modules: Sequence[str],
        log_level: str,
        first: Begun | None = None,
        errors: int = 2,
    ) -> None:
        """first: a fork server that has been begun. errors: a descriptor, for what fork servers print themselves."""
        self._begin, self._modules, self._log_level, self._errors = begin, modules, log_level, errors
        self._server = self._start(first)
        self._changed = asyncio.Event()  # replaced with every server

    def _start(self, begun: Begun | None) -> ForkServer:
        return ForkServer(begun or self._begin(), self._modules, self._log_level, self._errors)

    @property
    def pid(self) -> int | None:
        """The pid of the fork server; None while none runs. May be asked in any thread."""
        server = self._server
        return None if server.ended.done() else server.pid

    async def run(self, tell: Callable[[str, float, float], None]) -> None:
        """Replaces the fork server whenever it ends, until it is cancelled. `tell` gets the reason of its end, the
        seconds that it lived, and those until another one begins."""
        backoff = Backoff()
        while True:
            started = time.monotonic()
            why = await asyncio.shield(self._server.ended)
            lived = time.monotonic() - started
            pause = backoff.after(lived)
            tell(why, lived, pause)
            await asyncio.sleep(pause)
            self._server = self._start(None)
            self._changed.set()
            self._changed = asyncio.Event()

    async def fork(self, tell: Callable[[str], None], errors: int = 2) -> Forked:
        """Makes a process, by this fork server or a later one. `tell` gets the reason of a delay. `errors`: its
        standard error."""
        while True:
            server, changed = self._server, self._changed
            try:
                return await server.fork(errors)
            except ForkServerLost as error:
                tell(str(error))
                await changed.wait()

    async def stop(self) -> None:
        """Ends the fork server, and nothing else. Follows `run`."""
        self.kill()  # it has nothing to leave in order, and may be frozen
        await asyncio.shield(self._server.ended)

    def kill(self) -> None:
        """Ends the fork server at once."""
        self._server.kill()


class ForkedProcess:
    """A child of this process, which begins its work when it is told."""

    def __init__(self, forked: Forked, told: Mapping[str, Any]) -> None:
        """told: becomes a line of JSON on its standard input. A pipe has room for 64 KiB."""
        self._loop = asyncio.get_running_loop()
        self.pid, input, self._output = forked
        self._pidfd = os.pidfd_open(self.pid)
        self._loop.add_reader(self._output, self._read_lines)
        self._loop.add_reader(self._pidfd, self._reap)
        self.ended: asyncio.Future[int] = self._loop.create_future()  # its exit status, or minus a signal's number
        with suppress(BrokenPipeError):  # it has died, and `ended` will say so
            os.write(input, json.dumps(told).encode() + b"\n")
        os.close(input)

    def send_signal(self, number: signal.Signals) -> None:
        """Sends it a signal. By its descriptor, because its pid may belong to another process by now."""
        if not self.ended.done():
            try:
                signal.pidfd_send_signal(self._pidfd, number)
            except ProcessLookupError:
                log.info("process has ended already", extra={"forked_pid": self.pid})

    def _printed(self, line: str) -> None:
        """Takes a line that a process has printed."""
        if line.strip():
            log.info("process printed", extra={"forked_pid": self.pid, "line": line})

    def _read_lines(self) -> None:
        """Reads what it has printed. A service prints one line, written at once: where it listens."""
        printed = os.read(self._output, 65536)
        if not printed:
            self._loop.remove_reader(self._output)
        for line in printed.decode(errors="replace").splitlines():
            self._printed(line)

    def _reap(self) -> None:
        left = select.poll()  # select() knows no descriptor above 1,023
        left.register(self._output)
        if left.poll(0):
            self._read_lines()  # its last words
        self._loop.remove_reader(self._output)
        self._loop.remove_reader(self._pidfd)
        status = exit_status(self.pid)
        os.close(self._output)
        os.close(self._pidfd)
        self.ended.set_result(status)
