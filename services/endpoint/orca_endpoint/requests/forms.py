"""The form that a request gives its answer: compiled and refused before the pool has the request.

`form_compiler` does the work, in two processes that are started with the first form. A caller has one of them at a
time, and callers have turns, so that the forms of one keep no other waiting. Where a form ends its process, the
turn lasts until another one is in its place.
"""

import asyncio
import json
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Protocol

from orca_common.checkpoint import Checkpoint
from orca_common.errors import ErrorReason, FailedPrecondition, InvalidArgument, Unavailable
from orca_common.sampling import MAX_FORM_BYTES

from .limits import full
from .tool_grammar import ToolForm
from .tools import TOOLS

COMPILERS = 2
WAITING = 64  # forms of one caller that may wait for a compiler
ALL_WAITING = 1024  # forms of all callers, of up to 64 KB
KEPT = 256  # forms that were compiled last; they need not be compiled again
PATIENCE = 10.0  # seconds of an answer; the compiler's own limit is half a second of CPU time
START = 60.0  # seconds for a compiler to start: it reads the tokenizer
LAST = 0.5  # seconds for a compiler to end, once its input has
TRIES = 2  # processes for one form: the first one may be ended by others
TOO_HARD = "is too large or too complex to be followed"
# How a form ends its compiler: by its limit of CPU time, by memory that it did not get, by a stack that was too small.
ENDS = (-signal.SIGPROF, -signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS, 1)


class Names(Protocol):
    """Makes errors that name the request's fields as the caller does: `validation.Fields`."""

    def name(self, field: str) -> str: ...

    def error(self, field: str, problem: str, *, place: str) -> InvalidArgument: ...


class Turns:
    """Turns of callers: one of each at a time. Callers that wait have theirs in rotation, and their forms in order."""

    def __init__(self, count: int) -> None:
        """count: turns at a time."""
        self._free, self._having = count, set[str]()
        self.count = 0  # turns that are waited for
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by caller, the next one first

    @asynccontextmanager
    async def turn(self, caller: str) -> AsyncGenerator[None]:
        """Raises ResourceExhausted when too many of the caller's forms wait, or of all."""
        if self._free and caller not in self._having:
            self._take(caller)
        else:
            await self._wait(caller)
        try:
            yield
        finally:
            self._give_back(caller)

    def _take(self, caller: str) -> None:
        self._free -= 1
        self._having.add(caller)

    async def _wait(self, caller: str) -> None:
        if len(self._waiting.get(caller, ())) >= WAITING:
            raise full(f"{WAITING} forms of this caller wait to be compiled here already")
        if self.count >= ALL_WAITING:
            raise full(f"{ALL_WAITING} forms wait to be compiled here already")
        given = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append(given)
        self.count += 1
        try:
            await given
        except asyncio.CancelledError:
            if not given.cancelled():  # it was given at this moment
                self._give_back(caller)
            raise

    def _give_back(self, caller: str) -> None:
        self._free += 1
        self._having.remove(caller)
        for following in list(self._waiting):
            if self._free and following not in self._having:
                self._give_to(following)

    def _give_to(self, caller: str) -> None:
        """Gives a free turn to the first form of a caller that waits; its others wait behind those of other callers."""
        waiting = self._waiting.pop(caller)
        while waiting:
            given = waiting.popleft()
            self.count -= 1
            if not given.done():
                self._take(caller)
                given.set_result(None)
                break
        if waiting:
            self._waiting[caller] = waiting


class Compiler:
    """One process that compiles. It is started when it is asked for, and again after it has ended."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: Process | None = None
        self._starting = asyncio.Lock()

    async def start(self) -> Process:
        """The process, once it has read the tokenizer. Raises Unavailable."""
        async with self._starting:
            if self._process is not None and self._process.returncode is not None:
                await self.end()
            if self._process is None:
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    *("-m", f"{__package__}.form_compiler", str(self._folder)),
                    stdin=PIPE,
                    stdout=PIPE,
                    stderr=DEVNULL,  # a panic's message may quote the form
                    limit=1 << 20,
                )
                if await exchange(self._process, b"", START) is None:
                    await self.end()
                    raise Unavailable("the compiler of forms does not start", reason=ErrorReason.NO_COMPILER)
            return self._process

    async def ask(self, line: bytes) -> dict[str, str] | None:
        """Returns the answer to a form, or None where it ends, or does not answer in time. Raises Unavailable."""
        return await exchange(await self.start(), line, PATIENCE)

    async def end(self) -> int | None:
        """Ends the process. Returns how it ended."""
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


class FormCompiler:
    """Compiles forms for one model, and keeps the outcomes. An outcome is what a compiler said, never that it ended."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._kept: OrderedDict[tuple[str, str], dict[str, str]] = OrderedDict()
        self._asking: dict[tuple[str, str, str], asyncio.Task[dict[str, str]]] = {}  # by caller, kind and text
        self._turns = Turns(COMPILERS)
        self._compilers = [Compiler(checkpoint.folder) for _ in range(COMPILERS)]
        self._free = [*self._compilers]
        self._warming: asyncio.Future[list[Process | BaseException]] | None = None

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
            if self._warming is None:
                starts = (one.start() for one in self._compilers)
                self._warming = asyncio.gather(*starts, return_exceptions=True)
            compiler = self._free.pop()
            try:
                return await self._compiled(compiler, kind, text)
            finally:
                self._free.append(compiler)

    async def _compiled(self, compiler: Compiler, kind: str, text: str) -> dict[str, str]:
        line = json.dumps({"kind": kind, "text": text}).encode() + b"\n"
        codes: list[int | None] = []
        while len(codes) < TRIES:
            answer = await compiler.ask(line)
            if answer is not None:
                self._kept[kind, text] = answer
                if len(self._kept) > KEPT:
                    self._kept.popitem(last=False)
                return answer
            codes.append(await compiler.end())
            if codes[-1] in ENDS and (codes[-1] == -signal.SIGPROF or codes.count(codes[-1]) > 1):
                await compiler.start()
                return {"problem": TOO_HARD, "place": ""}  # it would end the next one, too
        raise Unavailable("the compiler of forms was ended, or did not answer", reason=ErrorReason.NO_COMPILER)

    async def close(self) -> None:
        """Ends the compilers."""
        tasks = [*self._asking.values(), *([self._warming] if self._warming is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for compiler in self._compilers:
            await compiler.end()


async def exchange(process: Process, line: bytes, patience: float) -> dict[str, str] | None:
    """Returns the answer of a process to a line, or None where it ends, or does not answer in time."""
    assert process.stdin is not None
    assert process.stdout is not None
    answer = b""
    with suppress(TimeoutError, OSError, ValueError):  # ValueError: a longer line than any answer
        async with asyncio.timeout(patience):
            process.stdin.write(line)
            await process.stdin.drain()
            answer = await process.stdout.readline()
    return json.loads(answer) if answer.endswith(b"\n") else None
