"""The form that a request gives its answer: compiled and refused before the pool has the request.

`form_compiler` does the work, in processes that are started with the first form.
"""

import asyncio
import json
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from orca.v1.orca_pb2 import Chat
from orca_common.checkpoint import Checkpoint
from orca_common.errors import ErrorReason, FailedPrecondition, InvalidArgument
from orca_common.sampling import MAX_FORM_BYTES

from .answering import Answer
from .form_compiler import Question
from .helpers import COUNT, Helper, Helpers
from .schemas.kept import KEYWORDS
from .tools import TOOLS

WAITING = 64  # forms of one caller that may wait for a compiler
ALL_WAITING = 1024  # forms of all callers, whose bytes `max_body_bytes` bounds
KEPT_BYTES = 32 << 20  # of forms that were compiled last; they need not be compiled again
FEW = 1 << 10  # bytes of an outcome beside its texts
TOO_HARD = "is too large or too complex to be followed"


class Names(Protocol):
    """Makes errors that name the request's fields as the caller does: `validation.Fields`."""

    def name(self, field: str) -> str: ...

    def error(self, field: str, problem: str, *, place: str) -> InvalidArgument: ...


class LeftOut(NamedTuple):
    """A part of a schema to which an answer is not held, since its caller did not ask for strictness."""

    function: str  # whose arguments the schema is of; empty: of the text
    place: str  # in the schema, as ".properties.a.propertyNames"; empty: all of it

    @property
    def keyword(self) -> str:
        """The last keyword of the place; empty for the whole schema."""
        parts = [part.partition("[")[0] for part in self.place.split(".")]
        return next((part for part in reversed(parts) if part in KEYWORDS), "")


class Form(NamedTuple):
    """A form that an answer is held to."""

    grammar: str
    left_out: Sequence[LeftOut] = ()


class FormCompiler:
    """Compiles forms for one model, and keeps the outcomes. An outcome is what a compiler said, never that it ended."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._kept: OrderedDict[bytes, Answer] = OrderedDict()  # by the question, the last one used last
        self._bytes = 0  # of these
        self._asking: dict[tuple[str, bytes], asyncio.Task[Answer | None]] = {}  # by caller and question
        module, opening = f"{__package__}.form_compiler", str(checkpoint.folder).encode()
        compilers = [Helper("the compiler of forms", module, opening, ErrorReason.NO_COMPILER) for _ in range(COUNT)]
        self.helpers = Helpers(compilers, "forms", WAITING, ALL_WAITING)

    async def grammar(self, kind: str, text: str, names: Names, caller: str = "", *, loose: bool = False) -> Form:
        """The grammar for the rank that samples. kind: a name of `sampling.FORMS`. caller: whose turn it is. loose: the
        nearest schema that can be enforced is wanted.

        Raises InvalidArgument by `names`, FailedPrecondition where the model cannot have forms, ResourceExhausted when
        too many forms wait, Unavailable when compilers end that are not to blame on the form.
        """
        form = text.encode()
        if not form:
            raise names.error(kind, "is empty", place="")
        if len(form) > MAX_FORM_BYTES:
            raise names.error(kind, f"has {len(form)} bytes; at most {MAX_FORM_BYTES} are allowed", place="")
        return await self._answer(
            {"kind": kind, "loose": loose, "bare": False, "syntax": "", "schema": None}, form, names, caller
        )

    async def tools(
        self, chat: Chat, syntax: str, schema: str | None, names: Names, caller: str = "", *, loose: bool = False
    ) -> Form:
        """The grammar of an answer to a chat with tools, which are checked. Raises as `grammar` does.

        schema: of its text, where that is JSON; compiled before. loose: for functions that are not strict, as above.
        """
        tools = Chat(
            tools=chat.tools, tool_choice=chat.tool_choice, tool_names=chat.tool_names, one_tool_call=chat.one_tool_call
        ).SerializeToString()
        asked: Question = {"kind": TOOLS, "loose": loose, "bare": False, "syntax": syntax, "schema": schema}
        return await self._answer(asked, tools, names, caller)

    async def _answer(self, asked: Question, form: bytes, names: Names, caller: str) -> Form:
        answer = await self._outcome(asked, form, caller)
        if answer is None and asked["loose"]:
            answer = await self._outcome({**asked, "bare": True}, form, caller)
        if answer is None:
            raise names.error(asked["kind"], TOO_HARD, place="")
        if "lacking" in answer:
            field = names.name(asked["kind"])
            raise FailedPrecondition(f"{field}: {answer['lacking']}", field, reason=ErrorReason.NO_FORMS)
        if "problem" in answer:
            raise names.error(answer.get("field", asked["kind"]), answer["problem"], place=answer["place"])
        return Form(answer["grammar"], [LeftOut(*one) for one in answer["left_out"]])

    async def _outcome(self, asked: Question, form: bytes, caller: str) -> Answer | None:
        """The answer of a compiler; None: the form is too much."""
        question = json.dumps(asked).encode() + b"\n" + form
        if (found := self._found(question)) is not None:
            return found
        key = (caller, question)
        task = self._asking.get(key)
        if task is None:
            task = self._asking[key] = asyncio.create_task(self._ask(*key))
            task.add_done_callback(lambda _: self._asking.pop(key))
        return await asyncio.shield(task)  # a caller that leaves does not end the exchange with the compiler

    def _found(self, question: bytes) -> Answer | None:
        found = self._kept.get(question)
        if found is not None:
            self._kept.move_to_end(question)
        return found

    async def _ask(self, caller: str, question: bytes) -> Answer | None:
        async with self.helpers.turn(caller) as compiler:
            if (found := self._found(question)) is not None:  # another caller has asked for the same
                return found
            answer = await compiler.ask(question)
            if answer is not None:
                self._keep(question, answer)
            return answer

    def _keep(self, question: bytes, answer: Answer) -> None:
        self._kept[question] = answer
        self._bytes += size_of(question, answer)
        while self._bytes > KEPT_BYTES:
            self._bytes -= size_of(*self._kept.popitem(last=False))

    async def close(self) -> None:
        """Ends the compilers."""
        asking = [*self._asking.values()]
        for task in asking:
            task.cancel()
        await self.helpers.close()
        await asyncio.gather(*asking, return_exceptions=True)


def size_of(question: bytes, answer: Answer) -> int:
    """Bytes that an outcome takes, about."""
    return len(question) + len(answer.get("grammar", "")) + FEW
