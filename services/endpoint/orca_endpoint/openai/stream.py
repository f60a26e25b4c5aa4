"""An answer as server-sent events, from its beginning or from where an earlier stream broke."""

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from ..calls.events import Accepted, Event, Finished
from ..http.exchange import Answer
from .answer import Choice, Numbered, SeenTo, UsageIn, check_whole, headers_of, usage


class Chunks(ABC):
    """Turns events into chunks. Constant parts are made once, so a chunk costs one small json.dumps.

    A method has a class of its own with the shape of its choices.
    """

    def __init__(self, name: str, kind: str, model: str, usage_in: UsageIn, numbered: bool) -> None:
        """name: the answer's id. kind: OpenAI's `object`. numbered: each event has an id (`SeenTo`); only of a single
        choice."""
        head = {"id": name, "object": kind, "created": int(time.time()), "model": model}
        self._head = json.dumps(head)[:-1]
        self._usage_in, self._no_usage = usage_in, ',"usage":null' if usage_in.end else ""
        self._numbered = numbered

    @abstractmethod
    def begun(self, n: int, choice: Choice) -> bytes:
        """The chunk of a choice whose request was accepted; empty when there is nothing to show."""

    @abstractmethod
    def shown(self, n: int, choice: Choice, piece: Sequence[Event]) -> bytes:
        """The chunks of events that came together, without the end; empty when there is nothing to show."""

    @abstractmethod
    def finished(self, n: int, choice: Choice, event: Finished) -> bytes:
        """The last chunk of a choice."""

    def usage(self, *counted: int) -> bytes:
        """counted: what `usage` takes."""
        counts = json.dumps(usage(*counted))
        return f'data: {self._head},"choices":[],"usage":{counts}}}\n\n'.encode()

    def chunk(self, choice: Choice, body: str, end: int = 0) -> bytes:
        """The chunk of a choice. body: the choice as JSON. end: which of the events behind the last token it is."""
        number = f"id: {SeenTo(choice.shown_tokens, end)}\n" if self._numbered else ""
        counts = self._no_usage
        if self._usage_in.each:
            counts = (
                f',"usage":{json.dumps(usage(choice.input_tokens, max(choice.output_tokens, choice.shown_tokens)))}'
            )
        return f'{number}data: {self._head},"choices":[{body}]{counts}}}\n\n'.encode()


class Stream:
    """Writes events as chunks. Tokens that are there together are one chunk."""

    def __init__(self, answer: Answer, chunks: Chunks, silence: float, more: Mapping[str, str] | None = None) -> None:
        """silence: seconds without an event after which a comment is written; 0: none is. more: headers."""
        self._answer, self._chunks, self._silence, self._more = answer, chunks, silence, more or {}

    async def write(self, events: Numbered, choices: Sequence[Choice], name: str) -> None:
        """Sends headers with the first event, so that a refusal has its own status. Raises Cancelled."""
        async with self._answer.commented(self._silence):
            await self._write(events, choices, name)

    async def _write(self, events: Numbered, choices: Sequence[Choice], name: str) -> None:
        async for n, piece in events:
            choice, first = choices[n], piece[0]
            sent = b""
            if isinstance(first, Accepted):
                choice.input_tokens = first.input_tokens
                if not self._answer.started:
                    await self._answer.start_stream({**headers_of(name, first), **self._more})
                sent = self._chunks.begun(n, choice)
            sent += self._chunks.shown(n, choice, piece)
            if isinstance(last := piece[-1], Finished):
                check_whole(last, name)
                choice.output_tokens, choice.cached_tokens = last.output_tokens, last.cached_tokens
                sent += self._chunks.finished(n, choice, last)
            if sent:
                await self._answer.write(sent)

    async def end(self, counts: tuple[int, int, int] | None) -> None:
        """counts: tokens of the prompts and of the generations, and cached ones, where they are asked for."""
        if counts is not None:
            await self._answer.write(self._chunks.usage(*counts))
        await self._answer.write(b"data: [DONE]\n\n")
        await self._answer.end()
