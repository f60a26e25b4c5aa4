"""An answer as a stream, from its beginning or from where an earlier one broke."""

import json
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import ClassVar

from orca_common.errors import OrcaError

from ..calls.events import Accepted, Event, Finished
from ..http.exchange import COMMENT, EVENTS, Answer, failed_event
from .answer import Choice, Numbered, SeenTo, UsageIn, check_whole, headers_of, usage

DONE = b"data: [DONE]\n\n"


class Chunks(ABC):
    """Turns events into server-sent events, or into what else an API streams. Each API has a class of its own."""

    kind: ClassVar[str] = EVENTS  # of the stream's content

    @abstractmethod
    def begun(self, n: int, choice: Choice, accepted: Accepted) -> bytes:
        """The chunks of a choice whose request was accepted; empty when there is nothing to show."""

    @abstractmethod
    def shown(self, n: int, choice: Choice, piece: Sequence[Event]) -> bytes:
        """The chunks of events that came together, without the end; empty when there is nothing to show."""

    @abstractmethod
    def finished(self, n: int, choice: Choice, event: Finished) -> bytes:
        """The last chunks of a choice."""

    @abstractmethod
    def ended(self, counts: tuple[int, int, int] | None) -> bytes:
        """The last bytes, behind all choices. counts: tokens of the prompts, of the generations, and cached ones, where
        asked for."""

    def failed(self, error: OrcaError) -> bytes:
        """The chunk that ends a stream with an error."""
        return failed_event(error)

    def waiting(self) -> bytes:
        """A chunk that says nothing, for a silent stream."""
        return COMMENT


class ChoiceChunks(Chunks):
    """The chunks of chats and completions. Constant parts are made once, so a chunk costs one small json.dumps."""

    def __init__(self, name: str, kind: str, model: str, usage_in: UsageIn, numbered: bool) -> None:
        """name: the answer's id. kind: OpenAI's `object`. numbered: each event has an id (`SeenTo`); only of a single
        choice."""
        self._first = {"id": name, "object": kind, "created": int(time.time())}
        self.name_model(model)
        self._usage_in, self._no_usage = usage_in, ',"usage":null' if usage_in.end else ""
        self._numbered = numbered

    def name_model(self, model: str) -> None:
        """Sets the model's name in all chunks that follow."""
        self._head = json.dumps({**self._first, "model": model})[:-1]

    def ended(self, counts: tuple[int, int, int] | None) -> bytes:
        if counts is None:
            return DONE
        return f'data: {self._head},"choices":[],"usage":{json.dumps(usage(*counts))}}}\n\n'.encode() + DONE

    def chunk(self, choice: Choice, body: str, end: int = 0) -> bytes:
        """The chunk of a choice. body: the choice as JSON. end: which of the events behind the last token it is."""
        number = f"id: {SeenTo(choice.shown_tokens, end)}\n" if self._numbered else ""
        counts = self._no_usage
        if self._usage_in.each:
            counts = (
                f',"usage":{json.dumps(usage(choice.input_tokens, max(choice.output_tokens, choice.shown_tokens)))}'
            )
        return f'{number}data: {self._head},"choices":[{body}]{counts}}}\n\n'.encode()


async def chunked(
    events: Numbered, choices: Sequence[Choice], chunks: Chunks, name: str
) -> AsyncIterator[tuple[Accepted | None, bytes]]:
    """Turns events that are there together into chunks, with the one that begins a choice. Raises Cancelled."""
    async for n, piece in events:
        choice, first, accepted = choices[n], piece[0], None
        sent = b""
        if isinstance(first, Accepted):
            accepted, choice.input_tokens = first, first.input_tokens
            sent = chunks.begun(n, choice, first)
        sent += chunks.shown(n, choice, piece)
        if isinstance(last := piece[-1], Finished):
            check_whole(last, name)
            choice.output_tokens, choice.cached_tokens = last.output_tokens, last.cached_tokens
            sent += chunks.finished(n, choice, last)
        yield accepted, sent


class Stream:
    """Writes events as chunks. Tokens that are there together are one chunk."""

    def __init__(self, answer: Answer, chunks: Chunks, silence: float, more: Mapping[str, str] | None = None) -> None:
        """silence: seconds without an event after which a comment is written; 0: none is. more: headers."""
        self._answer, self._chunks, self._silence, self._more = answer, chunks, silence, more or {}

    async def write(self, events: Numbered, choices: Sequence[Choice], name: str) -> None:
        """Sends headers with the first event, so that a refusal has its own status. Raises Cancelled."""
        async with self._answer.commented(self._silence, self._chunks.waiting):
            await self._write(events, choices, name)

    async def _write(self, events: Numbered, choices: Sequence[Choice], name: str) -> None:
        async for accepted, sent in chunked(events, choices, self._chunks, name):
            if accepted is not None and not self._answer.started:
                headers = {**headers_of(name, accepted), **self._more}
                await self._answer.start_stream(headers, self._chunks.failed, self._chunks.kind)
            if sent:
                await self._answer.write(sent)

    async def end(self, counts: tuple[int, int, int] | None) -> None:
        """counts: as `usage` takes them, where they are asked for."""
        await self._answer.write(self._chunks.ended(counts))
        await self._answer.end()
