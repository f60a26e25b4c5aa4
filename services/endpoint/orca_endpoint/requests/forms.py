"""The form that a request gives its answer: compiled and refused before the pool has the request.

`form_compiler` does the work, in a process that is started with the first form. It takes one form at a time.
"""

import asyncio
import json
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import OrderedDict
from contextlib import suppress
from typing import Protocol

from orca_common.checkpoint import Checkpoint
from orca_common.errors import ErrorReason, FailedPrecondition, InvalidArgument
from orca_common.sampling import MAX_FORM_BYTES

from .limits import full
from .tool_grammar import ToolForm
from .tools import TOOLS

WAITING = 64  # forms that may wait for the compiler
KEPT = 256  # forms that were compiled last; they need not be compiled again
PATIENCE = 10.0  # seconds of an answer; the compiler's own limit is half a second of CPU time
START = 60.0  # seconds for a compiler to start: it reads the tokenizer
TOO_HARD = "is too large or too complex to be followed"


class Names(Protocol):
    """Makes errors that name the request's fields as the caller does: `validation.Fields`."""

    def name(self, field: str) -> str: ...

    def error(self, field: str, problem: str, *, place: str) -> InvalidArgument: ...


class FormCompiler:
    """Compiles forms for one model, and keeps the outcomes."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._kept: OrderedDict[tuple[str, str], dict[str, str]] = OrderedDict()
        self._asking: dict[tuple[str, str], asyncio.Task[dict[str, str]]] = {}
        self._turn = asyncio.Lock()
        self._process: Process | None = None

    async def grammar(self, kind: str, text: str, names: Names) -> str:
        """The grammar for the rank that samples. kind: a name of `sampling.FORMS`.

        Raises InvalidArgument by `names`, FailedPrecondition where the model cannot have forms, ResourceExhausted when
        too many forms wait.
        """
        size = len(text.encode())
        if not size:
            raise names.error(kind, "is empty", place="")
        if size > MAX_FORM_BYTES:
            raise names.error(kind, f"has {size} bytes; at most {MAX_FORM_BYTES} are allowed", place="")
        return await self._answer(kind, text, names)

    async def tools(self, form: ToolForm, names: Names) -> str:
        """The grammar of an answer that may call functions. Raises as `grammar` does."""
        return await self._answer(TOOLS, json.dumps(form), names)

    async def _answer(self, kind: str, text: str, names: Names) -> str:
        answer = await self._outcome(kind, text)
        if "lacking" in answer:
            field = names.name(kind)
            raise FailedPrecondition(f"{field}: {answer['lacking']}", field, reason=ErrorReason.NO_FORMS)
        if "problem" in answer:
            raise names.error(kind, answer["problem"], place=answer["place"])
        return answer["grammar"]

    async def _outcome(self, kind: str, text: str) -> dict[str, str]:
        key = (kind, text)
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
            return found
        task = self._asking.get(key)
        if task is None:
            if len(self._asking) >= WAITING:
                raise full(f"{WAITING} forms are being compiled here already")
            task = self._asking[key] = asyncio.create_task(self._ask(key))
            task.add_done_callback(lambda _: self._asking.pop(key))
        return await asyncio.shield(task)  # a caller that leaves does not end the exchange with the compiler

    async def _ask(self, key: tuple[str, str]) -> dict[str, str]:
        kind, text = key
        async with self._turn:
            answer = await self._exchange(json.dumps({"kind": kind, "text": text}).encode() + b"\n")
        self._kept[key] = answer
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return answer

    async def _exchange(self, line: bytes) -> dict[str, str]:
        """One form's outcome. A compiler that dies of it, or does not answer, is replaced for the next one."""
        patience = PATIENCE
        if self._process is None:
            patience = START
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", f"{__package__}.form_compiler", str(self._checkpoint.folder)),
                stdin=PIPE,
                stdout=PIPE,
                stderr=DEVNULL,  # a panic's message may quote the form
                limit=1 << 20,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        answer = b""
        with suppress(TimeoutError, OSError, ValueError):  # ValueError: a longer line than any answer
            async with asyncio.timeout(patience):
                self._process.stdin.write(line)
                await self._process.stdin.drain()
                answer = await self._process.stdout.readline()
        if answer.endswith(b"\n"):
            return json.loads(answer)
        await self._end()
        return {"problem": TOO_HARD, "place": ""}

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            assert process.stdin is not None
            process.stdin.close()

    async def close(self) -> None:
        """Ends the compiler."""
        for task in list(self._asking.values()):
            task.cancel()
        await asyncio.gather(*self._asking.values(), return_exceptions=True)
        await self._end()
