"""An answer of Ollama's API as it grows: a line of JSON for each piece, or one object."""

import json
import time
from abc import abstractmethod
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, ClassVar

from orca_common.errors import OrcaError
from orca_pool.records import Reason

from ..calls.events import Accepted, Event, Finished, Token
from ..http.errors import in_lines
from ..openai.answer import Choice
from ..openai.chat.answer import Logprobs
from ..openai.replies import Reply
from ..requests.tools import object_of
from ..text.tool_calls import CallPart


class Lines(Reply):
    """One answer. Its last line, and its object, have counts and durations, in nanoseconds."""

    kind: ClassVar[str] = "application/x-ndjson"

    def __init__(self, model: str, streams: bool, scores: Logprobs | None = None) -> None:
        """streams: lines are wanted. scores: None where no logprobs are."""
        self._model, self._streams, self._scores = model, streams, scores
        self._texts, self._calls, self._scored = list[str](), list[dict[str, Any]](), list[dict[str, Any]]()
        self._open: tuple[dict[str, Any], list[str]] | None = None  # the call that grows, with its arguments
        self._began = time.monotonic_ns()
        self._tokens = list[int]()  # moments of the first token and of the last
        self._input_tokens = 0
        self._end: dict[str, Any] = {}

    @abstractmethod
    def said(self, content: str, calls: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        """A text and whole calls, as the members of a line."""

    def begun(self, n: int, choice: Choice, accepted: Accepted) -> bytes:
        self._input_tokens = accepted.input_tokens
        return b""

    def shown(self, n: int, choice: Choice, piece: Sequence[Event]) -> bytes:
        if any(type(event) is Token for event in piece):
            self._tokens = [*self._tokens[:1], time.monotonic_ns()]
        return super().shown(n, choice, piece)

    def finished(self, n: int, choice: Choice, event: Finished) -> bytes:
        sent = self._events_of(event) + self._close()
        ended = time.monotonic_ns()
        first, last = (self._tokens or [ended])[0], (self._tokens or [ended])[-1]
        self._end = {
            "done": True,
            "done_reason": "length" if event.reason is Reason.LENGTH else "stop",
            "total_duration": ended - self._began,
            "load_duration": 0,  # the model was there
            "prompt_eval_count": self._input_tokens,
            "prompt_eval_duration": first - self._began,
            "eval_count": event.output_tokens,
            "eval_duration": last - first,
        }
        return sent + self._line(self.said(""))

    def ended(self, counts: tuple[int, int, int] | None) -> bytes:
        return b""

    def failed(self, error: OrcaError) -> bytes:
        return written(in_lines(error))

    def waiting(self) -> bytes:
        """A piece without a text, as a line of JSON has no comments. Nothing is behind the last line."""
        return b"" if self._end else written(self.head() | self.said("") | {"done": False})

    def whole(self) -> dict[str, Any]:
        scored = {"logprobs": self._scored} if self._scores is not None else {}
        return self.head() | self.said("".join(self._texts), self._calls) | scored | self._end

    def at_once(self, reason: str) -> dict[str, Any]:
        """The whole answer to a question without a prompt. reason: `load` or `unload`."""
        return self.head() | self.said("") | {"done": True, "done_reason": reason}

    def head(self) -> dict[str, Any]:
        return {"model": self._model, "created_at": now()}

    # -- the parts
    def _line(self, said: dict[str, Any]) -> bytes:
        return written(self.head() | said | (self._end or {"done": False})) if self._streams else b""

    def _shows(self, event: Token | Finished) -> bool:
        return self._scores is not None and type(event) is Token and event.logprob is not None

    def _text(self, content: str, event: Token | Finished) -> bytes:
        scored = list[dict[str, Any]]()
        if self._scores is not None and type(event) is Token and event.logprob is not None:
            scored = self._scores.of([event])["content"]
        if not self._streams:  # a long stream would keep some kB a token
            self._texts.append(content)
            self._scored += scored
        return self._line(self.said(content) | ({"logprobs": scored} if scored else {}))

    def _open_call(self, part: CallPart) -> bytes:
        sent = self._close()
        self._open = {"id": part.id, "function": {"index": len(self._calls), "name": part.name}}, []
        return sent

    def _arguments(self, piece: str) -> bytes:
        assert self._open is not None
        self._open[1].append(piece)
        return b""

    def _close(self) -> bytes:
        """Ends the call that grows, if there is one: a line has a whole call, whose arguments are an object. They are
        closed where they were cut."""
        if self._open is None:
            return b""
        call, pieces = self._open
        self._open = None
        arguments = object_of("".join(pieces))
        self._calls.append({**call, "function": {**call["function"], "arguments": arguments}})
        return self._line(self.said("", self._calls[-1:]))


class ChatLines(Lines):
    """The answer to a chat."""

    def said(self, content: str, calls: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        more = {"tool_calls": list(calls)} if calls else {}
        return {"message": {"role": "assistant", "content": content, **more}}


class GeneratedLines(Lines):
    """The answer to a prompt."""

    def said(self, content: str, calls: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        return {"response": content}


def written(line: dict[str, Any]) -> bytes:
    return json.dumps(line).encode() + b"\n"


def now() -> str:
    """The time of day as in RFC 3339."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")
