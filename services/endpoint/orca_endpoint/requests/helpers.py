"""Processes for work whose rules a stranger wrote: it may take minutes or gigabytes, or end its process.

Each question is for one of them, which bounds its own time and memory and may die. A caller has one at a time, and
callers have turns. Where a question ends its process, the turn lasts until another one is in its place.
`answering` has the side of the process, and how questions and answers travel.
"""

import asyncio
import json
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress

from orca_common.errors import ErrorReason, Unavailable

from .answering import Answer, framed
from .threads import finished
from .turns import Turns

COUNT = 2  # processes: beside the one that a caller has, another is free
# Seconds for an answer. A process bounds its own processor time, at 1.5 s at most. On a loaded machine that takes long:
# more than 10 s at a load of 40 on two cores.
PATIENCE = 30.0
START = 60.0  # seconds for a process to start
LAST = 0.5  # seconds for a process to end, once its input has
TRIES = 2  # processes for one question: the first one may be ended by others
# How a question ends its process: by its limit of CPU time, by memory that it did not get, by a stack too small.
ENDS = (-signal.SIGPROF, -signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS, 1)


class Helper:
    """One process. It is started when it is asked for, and again after it has ended."""

    def __init__(self, name: str, module: str, opening: bytes, reason: ErrorReason) -> None:
        """name: of the process, for errors, which have this reason. opening: its first question, answered when it is
        ready."""
        self._name, self._module, self._opening, self._reason = name, module, opening, reason
        self._process: Process | None = None
        self._starting, self._ending = asyncio.Lock(), asyncio.Lock()
        self._closed = False

    async def start(self) -> Process:
        """The process, once it is ready. Raises Unavailable."""
        async with self._starting:
            if self._process is not None and self._process.returncode is not None:
                await self.end()
            if self._process is None and not self._closed:
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    *("-m", self._module),
                    stdin=PIPE,
                    stdout=PIPE,
                    stderr=DEVNULL,  # a panic's message may quote the question
                )
                if self._closed or await exchange(self._process, self._opening, START) is None:
                    await self.end()
            if self._closed:
                raise Unavailable("this endpoint is leaving", reason=ErrorReason.ENDPOINT_LEAVING)
            if self._process is None:
                raise Unavailable(f"{self._name} does not start", reason=self._reason)
            return self._process

    async def ask(self, question: bytes) -> Answer | None:
        """Returns the answer, or None where the question ends each process that it comes to. A cancelled call ends with
        the process's work. Raises Unavailable when processes end that are not to blame on the question."""
        return await finished(asyncio.ensure_future(self._ask(question)))

    async def _ask(self, question: bytes) -> Answer | None:
        codes: list[int | None] = []
        while len(codes) < TRIES:
            answer = await exchange(await self.start(), question, PATIENCE)
            if answer is not None:
                return answer
            codes.append(await self.end())
            if codes[-1] in ENDS and (codes[-1] == -signal.SIGPROF or codes.count(codes[-1]) > 1):
                await self.start()
                return None  # it would end the next one, too
        raise Unavailable(f"{self._name} was ended, or did not answer", reason=self._reason)

    async def close(self) -> None:
        """Ends the process for good."""
        self._closed = True
        await self.end()
        async with self._starting:  # until a start that is under way has ended its process, too
            pass

    async def end(self) -> int | None:
        """Ends the process. Returns how it ended; None without a process, as after an end that was under way."""
        async with self._ending:
            process, self._process = self._process, None
            if process is None:
                return None
            assert process.stdin is not None
            process.stdin.close()
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST):  # one that ends by itself says how
                    return await process.wait()
            with suppress(ProcessLookupError):
                process.kill()
            return await process.wait()


class Helpers:
    """Some processes of one kind, and the turns of callers at them."""

    def __init__(self, helpers: Sequence[Helper], work: str, waiting: int, all_waiting: int) -> None:
        """work, waiting, all_waiting: as for `Turns`."""
        self.all, self._free = helpers, [*helpers]
        self.turns = Turns(work, len(helpers), 1, waiting, all_waiting)
        self._warming: asyncio.Task[None] | None = None

    def warm(self) -> None:
        """Starts the processes, so that the first question finds one ready. Once or more often."""
        if self._warming is None:
            self._warming = asyncio.create_task(self._start_all())

    async def _start_all(self) -> None:
        """Begins with the process that `turn` takes first. Started at once, the others would take the cores from it."""
        for helper in reversed(self.all):
            with suppress(Unavailable, OSError):  # a question to this one tries again, and says so
                await helper.start()

    @asynccontextmanager
    async def turn(self, caller: str) -> AsyncGenerator[Helper]:
        """A helper, when it is the caller's turn. Raises ResourceExhausted when too many wait."""
        async with self.turns.turn(caller):
            self.warm()
            helper = self._free.pop()
            try:
                yield helper
            finally:
                self._free.append(helper)

    async def close(self) -> None:
        """Ends the processes, and with an error what they work on."""
        await asyncio.gather(*(helper.close() for helper in self.all))
        if self._warming is not None:
            await self._warming


async def exchange(process: Process, question: bytes, patience: float) -> Answer | None:
    """Returns the answer of a process, or None where it ends, or does not answer in time."""
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(TimeoutError, OSError, asyncio.IncompleteReadError, ValueError):
        async with asyncio.timeout(patience):
            process.stdin.write(framed(question))
            await process.stdin.drain()
            size = int.from_bytes(await process.stdout.readexactly(8), "little")
            return json.loads(await process.stdout.readexactly(size))
    return None
