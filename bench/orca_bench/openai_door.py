"""Any server with OpenAI's completions for the bench: token ids in, server-sent events out.

A connection a request, over plain HTTP. The end-of-sequence token must not end a request. OpenAI's API has no field for
that, so the first request tries what servers know: `ignore_eos`, and `min_tokens` as large as `max_tokens`.
"""

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

import httptools

from orca_common.errors import FailedPrecondition

from .cases import Request
from .measures import Answer

EXTENSIONS = (("ignore_eos", "min_tokens"), ("ignore_eos",), ("min_tokens",), ())  # tried in this order
REFUSED = ("HTTP 400", "HTTP 422")  # the body has a field that the server does not know
EVENT_END = b"\n\n"


class Piece(NamedTuple):
    """A part of an answer's body, and when it came."""

    moment: float
    data: bytes


@dataclass
class Exchange:
    """One answer, as httptools reports it."""

    clock: Callable[[], float]
    status: int = 0
    pieces: list[Piece] = field(default_factory=list)
    complete: bool = False

    def on_body(self, data: bytes) -> None:
        self.pieces.append(Piece(self.clock(), data))

    def on_message_complete(self) -> None:
        self.complete = True

    @property
    def body(self) -> bytes:
        return b"".join(piece.data for piece in self.pieces)


def server_sent(pieces: Sequence[Piece]) -> Iterator[Piece]:
    """The data of each server-sent event, and when its end came."""
    rest = b""
    for moment, data in pieces:
        *events, rest = (rest + data).replace(b"\r\n", b"\n").split(EVENT_END)
        for event in events:
            lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                yield Piece(moment, b"\n".join(lines))


class OpenAIDoor:
    """`Door` to the server at a URL, as in http://127.0.0.1:8000 or http://127.0.0.1:8000/v1."""

    def __init__(self, url: str, label: str = "openai") -> None:
        """Raises FailedPrecondition when the URL is not one of plain HTTP."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme != "http" or not parts.hostname:
            raise FailedPrecondition(f"openai: {url} is not an address as in http://127.0.0.1:8000/v1")
        self.url, self.label = url, label
        self._host, self._port = parts.hostname, parts.port or 80
        self._path = parts.path.rstrip("/") or "/v1"
        self.model, self.extensions = "", EXTENSIONS[0]
        self.vocab_size: int | None = None  # of a server that tells it, as Orca does

    async def __aenter__(self) -> Self:
        """Learns the model's name and how to keep requests from ending early. Raises FailedPrecondition."""
        try:
            models = await self._exchange("GET", "/models", b"", lambda: 0.0)
            told = json.loads(models.body)["data"][0]
            self.model, self.vocab_size = told["id"], told.get("vocab_size")
        except OSError as error:
            raise FailedPrecondition(f"openai: {self.url} does not answer ({error.strerror or error})") from None
        except (httptools.HttpParserError, ValueError, LookupError, TypeError) as error:
            raise FailedPrecondition(
                f"openai: {self.url} does not name a model ({type(error).__name__}: {error})"
            ) from None
        refusal = ""
        for self.extensions in EXTENSIONS:
            tried = Answer(Request([1, 2, 3], 2), 0.0)
            await self.ask(tried, lambda: 0.0)
            if not tried.error:
                return self
            refusal = refusal or tried.error
            if not tried.error.startswith(REFUSED):
                break
        raise FailedPrecondition(f"openai: {self.url} refuses a completion: {refusal}")

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...

    async def ask(self, answer: Answer, clock: Callable[[], float]) -> None:
        try:
            exchange = await self._exchange("POST", "/completions", self._body(answer.request), clock)
        except (OSError, httptools.HttpParserError) as error:
            answer.error, answer.ended = f"{type(error).__name__}: {error}", clock()
            return
        answer.ended = clock()
        if exchange.status == 200:
            read_events(exchange.pieces, answer)
        if not exchange.complete:
            answer.error = answer.error or "the connection ended before the answer"
        elif exchange.status != 200:
            answer.error = reason(exchange)

    def _body(self, request: Request) -> bytes:
        body = {
            "model": self.model,
            "prompt": request.prompt,
            "max_tokens": request.output,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        known = {"ignore_eos": True, "min_tokens": request.output}
        return json.dumps(body | {name: known[name] for name in self.extensions}).encode()

    async def _exchange(self, method: str, path: str, body: bytes, clock: Callable[[], float]) -> Exchange:
        """One request on a connection of its own."""
        reader, writer = await asyncio.open_connection(self._host, self._port)
        exchange = Exchange(clock)
        parser = httptools.HttpResponseParser(exchange)
        try:
            head = f"{method} {self._path}{path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\nConnection: close\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            while not exchange.complete and (data := await reader.read(1 << 16)):
                parser.feed_data(data)
                exchange.status = parser.get_status_code()
        finally:
            writer.close()
        return exchange


def read_events(pieces: Sequence[Piece], answer: Answer) -> None:
    """Fills in what a stream of completions says.

    An event that only ends the choice brings no token. It counts where no other event came: some servers, Orca's HTTP
    door among them, send none for tokens without text.
    """
    last = None
    for moment, data in server_sent(pieces):
        if data == b"[DONE]":
            continue
        event: dict[str, Any] = json.loads(data)
        if "error" in event:
            answer.error = json.dumps(event["error"])
        for choice in event.get("choices", ()):
            last = moment
            if choice.get("text") or choice.get("finish_reason") is None:
                answer.came.append(moment)
        if event.get("usage"):
            answer.tokens = event["usage"]["completion_tokens"]
    if not answer.came and last is not None:
        answer.came.append(last)


def reason(exchange: Exchange) -> str:
    """Why a server refused, in its own words."""
    return f"HTTP {exchange.status}: {exchange.body[:300].decode(errors='replace')}"
