"""The form that a request gives its answer: compiled and refused before the pool has the request.

`form_compiler` does the work, in a process that is started with the first form. It takes one form at a time, of each
caller in turn. Another one is warm: it takes the place of one that ends with a form that is too hard.
"""

import asyncio
import json
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Protocol

from orca_common.checkpoint import Checkpoint
from orca_common.errors import ErrorReason, FailedPrecondition, InvalidArgument, Unavailable
from orca_common.sampling import MAX_FORM_BYTES

from .limits import full
from .tool_grammar import ToolForm
from .tools import TOOLS

WAITING = 16  # forms of one caller that may wait for the compiler
ALL_WAITING = 256  # forms of all callers, of up to 64 KB
KEPT = 256  # forms that were compiled last; they need not be compiled again
PATIENCE = 10.0  # seconds of an answer; the compiler's own limit is half a second of CPU time
START = 60.0  # seconds for a compiler to start: it reads the tokenizer
LAST = 0.5  # seconds for a compiler to end, once its input has
TRIES = 3  # compilers for one form: one, and the warm one, may have been ended before it came
TOO_HARD = "is too large or too complex to be followed"
# How a form ends its compiler: by its limit of CPU time, by memory that it did not get, by a stack that was too small.
ENDS = (-signal.SIGPROF, -signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS, 1)


class Names(Protocol):
    """Makes errors that name the request's fields as the caller does: `validation.Fields`."""

    def name(self, field: str) -> str: ...

    def error(self, field: str, problem: str, *, place: str) -> InvalidArgument: ...


class Turns:
    """One turn at a time. Callers that wait have theirs in rotation, and the forms of one caller in their order."""

    def __init__(self) -> None:
        self._taken = False
        self._count = 0  # turns that are waited for
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by caller, the next one first

    @asynccontextmanager
    async def turn(self, caller: str) -> AsyncGenerator[None]:
        """Raises ResourceExhausted when too many of the caller's forms wait, or of all."""
        if self._taken:
            await self._wait(caller)
        self._taken = True
        try:
            yield
        finally:
            self._taken = False
            self._give()

    async def _wait(self, caller: str) -> None:
        if len(self._waiting.get(caller, ())) >= WAITING:
            raise full(f"{WAITING} forms of this caller wait to be compiled here already")
        if self._count >= ALL_WAITING:
            raise full(f"{ALL_WAITING} forms wait to be compiled here already")
        given = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append(given)
        self._count += 1
        try:
            await given
        except asyncio.CancelledError:
            if given.done() and not given.cancelled():  # it was given at this moment
                self._taken = False
                self._give()
            raise

    def _give(self) -> None:
        """Gives the turn to the first form of the next caller, whose others wait behind those of the other callers."""
        while self._waiting:
            caller, waiting = next(iter(self._waiting.items()))
            given = waiting.popleft()
            self._count -= 1
            del self._waiting[caller]
            if waiting:
                self._waiting[caller] = waiting
            if not given.done():
                given.set_result(None)
                self._taken = True
                return


class FormCompiler:
    """Compiles forms for one model, and keeps the outcomes. An outcome is what a compiler said, never that it ended."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._kept: OrderedDict[tuple[str, str], dict[str, str]] = OrderedDict()
        self._asking: dict[tuple[str, str, str], asyncio.Task[dict[str, str]]] = {}  # by caller, kind and text
        self._turns = Turns()
        self._process: Process | None = None
        self._spare: asyncio.Task[Process] | None = None  # the next one

    async def grammar(self, kind: str, text: str, names: Names, caller: str = "") -> str:
        """The grammar for the rank that samples. kind: a name of `sampling.FORMS`. caller: whose turn it is.

        Raises InvalidArgument by `names`, FailedPrecondition where the model cannot have forms, ResourceExhausted when
        too many forms wait, Unavailable when compilers end that are not to blame on the form.
        """
        size = len(text.encode())
        if not size:
            raise names.error(kind, "is empty", place="")
        if size > MAX_FORM_BYTES:
            raise names.error(kind, f"has {size} bytes; at most {MAX_FORM_BYTES} are allowed", place="")
        return await self._answer(kind, text, names, caller)

    async def tools(self, form: ToolForm, names: Names, caller: str = "") -> str:
        """The grammar of an answer that may call functions. Raises as `grammar` does."""
        return await self._answer(TOOLS, json.dumps(form), names, caller)

    async def _answer(self, kind: str, text: str, names: Names, caller: str) -> str:
        answer = await self._outcome(kind, text, caller)
        if "lacking" in answer:
            field = names.name(kind)
            raise FailedPrecondition(f"{field}: {answer['lacking']}", field, reason=ErrorReason.NO_FORMS)
        if "problem" in answer:
            raise names.error(kind, answer["problem"], place=answer["place"])
        return answer["grammar"]

    async def _outcome(self, kind: str, text: str, caller: str) -> dict[str, str]:
        if (found := self._found(kind, text)) is not None:
            return found
        key = (caller, kind, text)
        task = self._asking.get(key)
        if task is None:
            task = self._asking[key] = asyncio.create_task(self._ask(*key))
            task.add_done_callback(lambda _: self._asking.pop(key))
        return await asyncio.shield(task)  # a caller that leaves does not end the exchange with the compiler

    def _found(self, kind: str, text: str) -> dict[str, str] | None:
        found = self._kept.get((kind, text))
        if found is not None:
            self._kept.move_to_end((kind, text))
        return found

    async def _ask(self, caller: str, kind: str, text: str) -> dict[str, str]:
        async with self._turns.turn(caller):
            if (found := self._found(kind, text)) is not None:  # another caller has asked for the same
                return found
            return await self._compiled(kind, text)

    async def _compiled(self, kind: str, text: str) -> dict[str, str]:
        line = json.dumps({"kind": kind, "text": text}).encode() + b"\n"
        codes: list[int | None] = []
        while len(codes) < TRIES:
            answer = await exchange(await self._compiler(), line, PATIENCE)
            if answer is not None:
                self._kept[kind, text] = answer
                if len(self._kept) > KEPT:
                    self._kept.popitem(last=False)
                return answer
            codes.append(await self._end())
            if codes[-1] in ENDS and (codes[-1] == -signal.SIGPROF or codes.count(codes[-1]) > 1):
                return {"problem": TOO_HARD, "place": ""}  # it would end the next one, too
        raise Unavailable("the compiler of forms was ended, or did not answer", reason=ErrorReason.NO_COMPILER)

    async def _compiler(self) -> Process:
        """A compiler that has read the tokenizer, and another one for the time after it."""
        if self._process is None:
            if self._spare is None:
                self._spare = asyncio.create_task(self._start())
            starting, self._spare = self._spare, None
            self._process = await starting
            self._spare = asyncio.create_task(self._start())
        return self._process

    async def _start(self) -> Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", f"{__package__}.form_compiler", str(self._checkpoint.folder)),
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,  # a panic's message may quote the form
            limit=1 << 20,
        )
        try:
            if await exchange(process, b"", START) is not None:
                return process
        except asyncio.CancelledError:
            await ended(process)
            raise
        await ended(process)
        raise Unavailable("the compiler of forms does not start", reason=ErrorReason.NO_COMPILER)

    async def _end(self) -> int | None:
        """Ends the compiler. Returns how it ended, if it did by itself."""
        process, self._process = self._process, None
        return await ended(process) if process is not None else None

    async def close(self) -> None:
        """Ends the compilers."""
        tasks = [*self._asking.values(), *([self._spare] if self._spare is not None else [])]
        for task in tasks:
            task.cancel()
        for process in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(process, Process):
                await ended(process)
        await self._end()


async def exchange(process: Process, line: bytes, patience: float) -> dict[str, str] | None:
    """What a compiler answers to a line; None where it ends, or does not answer in time.

    Raises nothing but the caller's cancellation."""
    assert process.stdin is not None
    assert process.stdout is not None
    answer = b""
    with suppress(TimeoutError, OSError, ValueError):  # ValueError: a longer line than any answer
        async with asyncio.timeout(patience):
            process.stdin.write(line)
            await process.stdin.drain()
            answer = await process.stdout.readline()
    return json.loads(answer) if answer.endswith(b"\n") else None


async def ended(process: Process) -> int:
    """Ends a process that has not ended, and returns how it ended."""
    assert process.stdin is not None
    process.stdin.close()
    with suppress(TimeoutError):
        async with asyncio.timeout(LAST):  # one that ends by itself says how
            return await process.wait()
    with suppress(ProcessLookupError):
        process.kill()
    return await process.wait()
