"""The form that a request gives its answer: compiled and refused before the pool has the request.

`form_compiler` does the work, in processes that are started with the first form.
"""

import asyncio
import json
from collections import OrderedDict
from typing import Protocol

from orca_common.checkpoint import Checkpoint
from orca_common.errors import ErrorReason, FailedPrecondition, InvalidArgument
from orca_common.sampling import MAX_FORM_BYTES

from .helpers import COUNT, Helper, Helpers
from .tool_grammar import ToolForm
from .tools import TOOLS

WAITING = 64  # forms of one caller that may wait for a compiler
ALL_WAITING = 1024  # forms of all callers, of up to 64 KB
KEPT = 256  # forms that were compiled last; they need not be compiled again
TOO_HARD = "is too large or too complex to be followed"


class Names(Protocol):
    """Makes errors that name the request's fields as the caller does: `validation.Fields`."""

    def name(self, field: str) -> str: ...

    def error(self, field: str, problem: str, *, place: str) -> InvalidArgument: ...


class FormCompiler:
    """Compiles forms for one model, and keeps the outcomes. An outcome is what a compiler said, never that it ended."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._kept: OrderedDict[tuple[str, str], dict[str, str]] = OrderedDict()
        self._asking: dict[tuple[str, str, str], asyncio.Task[dict[str, str]]] = {}  # by caller, kind and text
        module, opening = f"{__package__}.form_compiler", str(checkpoint.folder).encode()
        compilers = [Helper("the compiler of forms", module, opening, ErrorReason.NO_COMPILER) for _ in range(COUNT)]
        self.helpers = Helpers(compilers, "forms", WAITING, ALL_WAITING)

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
        async with self.helpers.turn(caller) as compiler:
            if (found := self._found(kind, text)) is not None:  # another caller has asked for the same
                return found
            answer = await compiler.ask(json.dumps({"kind": kind, "text": text}).encode())
            if answer is None:
                return {"problem": TOO_HARD, "place": ""}
            self._kept[kind, text] = answer
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
            return answer

    async def close(self) -> None:
        """Ends the compilers."""
        asking = [*self._asking.values()]
        for task in asking:
            task.cancel()
        await self.helpers.close()
        await asyncio.gather(*asking, return_exceptions=True)
