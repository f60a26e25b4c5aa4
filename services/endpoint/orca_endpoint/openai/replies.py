"""Methods that answer one conversation with one reply: as a stream, or as a whole object."""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Scope

from orca_common.errors import InvalidArgument

from ..calls.endpoint import Endpoint
from ..calls.events import Event, Finished, Token
from ..http.access import caller_in
from ..http.bodies import body_in, parsed
from ..http.exchange import Answer, Exchange, deadline_of, silence_of, until
from ..text.tool_calls import CallPart
from .answer import Choice, headers_of, relaxed_header
from .generations import calls_of, together
from .request import Asked
from .stream import Chunks, Stream, chunked


class Reply(Chunks):
    """An answer in parts, a text and calls, one after the other. It keeps what has come, beside making its events."""

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The answer's object, as far as it has come."""

    def shown(self, n: int, choice: Choice, piece: Sequence[Event]) -> bytes:
        return b"".join(self._events_of(event) for event in piece if type(event) is Token)

    def _events_of(self, event: Token | Finished) -> bytes:
        """The events of a piece of the answer."""
        content, calls = (event.text, ()) if event.said is None else event.said
        sent = self._text(content, event) if content or self._shows(event) else b""
        for part in calls:
            if part.id:
                sent += self._open_call(part)
            if part.arguments:
                sent += self._arguments(part.arguments)
        return sent

    def _shows(self, event: Token | Finished) -> bool:
        """Whether an event without a text is shown in the text."""
        return False

    @abstractmethod
    def _text(self, content: str, event: Token | Finished) -> bytes:
        """The events of a piece of text, of which the first one begins the part."""

    @abstractmethod
    def _open_call(self, part: CallPart) -> bytes:
        """The events of a call that begins, and of the end of the part before it."""

    @abstractmethod
    def _arguments(self, piece: str) -> bytes:
        """The events of a piece of a call's arguments."""


@dataclass(frozen=True)
class Question(Asked):
    """A parsed body with one conversation."""

    theirs: Callable[[str], str]  # the caller's name of a place in the chat that its body became


Q = TypeVar("Q", bound=Question)


class Replies(Exchange, ABC, Generic[Q]):
    """The method as an ASGI application."""

    prefix: ClassVar[str]  # of the answers' ids
    form: ClassVar[str] = ""  # the caller's name of the form of the text

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    @abstractmethod
    def _parse(self, raw: bytes) -> Q:
        """Reads a body. Raises InvalidArgument."""

    @abstractmethod
    def _reply(self, name: str, question: Q) -> Reply:
        """The reply, of which nothing has come. name: its id."""

    async def _complete(self, question: Q, scope: Scope) -> Q:
        """Adds what the question refers to."""
        return question

    def _at_once(self, question: Q) -> dict[str, Any] | None:
        """The answer to a question that has no prompt; None: it has one."""
        return None

    async def _serve(self, request: Request, answer: Answer) -> None:
        endpoint, body = self._endpoint, body_in(request.scope)
        deadline, silence = deadline_of(request), silence_of(request, endpoint.settings.comment_seconds)
        question = await parsed(body, self._parse, endpoint.large, caller_in(request.scope))
        question = await self._complete(question, request.scope)
        if (told := self._at_once(question)) is not None:
            await answer.whole(JSONResponse(told))
            return
        name = f"{self.prefix}{secrets.token_hex(12)}"
        with endpoint.arrivals.coming():
            try:
                calls = await calls_of(question, name, endpoint, request, deadline)
            except InvalidArgument as error:
                raise InvalidArgument(question.theirs(error.field), error.problem, reason=error.reason) from None
        more = relaxed_header(calls[0].left_out, self.form)
        reply, choice = self._reply(name, question), Choice()
        question.samples.clear()  # long prompts need memory, and the call has them until the pool does
        async with together(calls, body.held) as events, until(deadline):
            if question.stream:
                stream = Stream(answer, reply, silence, more)
                await stream.write(events, [choice], name)
                await stream.end(None)
            else:
                headers = more
                async for accepted, _ in chunked(events, [choice], reply, name):
                    headers = headers if accepted is None else {**headers_of(name, accepted), **more}
                await answer.whole(JSONResponse(reply.whole(), headers=headers))


def named_event(kind: str, body: str) -> bytes:
    """A server-sent event with a name. body: its data as JSON."""
    return f"event: {kind}\ndata: {body}\n\n".encode()
