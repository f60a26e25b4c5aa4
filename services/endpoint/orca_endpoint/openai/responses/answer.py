"""A response as it grows: its events, numbered by its tokens alone, and its object.

Each token has its own events, so they have the same numbers at each endpoint, however the tokens come. A stream that is
taken up makes all of them again, and leaves out those that its client has seen.
"""

import json
import time
from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from orca_common.errors import OrcaError
from orca_pool.records import Reason

from ...calls.events import Accepted, Event, Finished, Token
from ...http.errors import failure
from ...text.tool_calls import CallPart
from ..answer import Choice
from ..chat.answer import Logprobs
from ..replies import Reply, named_event
from ..stream import DONE
from .kept import Kept

PREFIX = "resp_"
UNSEEN = -1  # as the number of the last event seen: none
NO_EVENTS = inf  # the same: all


def response_in(item_id: str) -> str:
    """The id of the response that has an item."""
    return PREFIX + item_id.partition("_")[2].partition("_")[0]


class ResponseReply(Reply):
    """One response. It takes the events of its request from the first one on."""

    def __init__(
        self, name: str, model: str, logprobs: Logprobs, kept: Kept | None = None, seen: float = UNSEEN
    ) -> None:
        """name: its id. kept: that of the request, where it tells it itself. seen: the number of the last event that
        the client has; no others are made."""
        self._name, self._model, self._kept, self._seen = name, model, kept, seen
        self._logprobs = logprobs
        self._key = name.removeprefix(PREFIX)
        self._number = -1  # of the last event
        self._items = list[dict[str, Any]]()  # those that are whole
        self._open: dict[str, Any] | None = None  # the item that grows
        self._texts, self._scores = list[str](), list[dict[str, Any]]()  # of this item
        self._input_tokens = self._output_tokens = self._cached_tokens = 0
        self._status, self._completed_at = "in_progress", int(time.time())
        self._error: OrcaError | None = None

    def begun(self, n: int, choice: Choice, accepted: Accepted) -> bytes:
        if self._kept is None:
            self._kept = Kept.of(accepted.kept)
        self._input_tokens = accepted.input_tokens
        created = self._event("response.created", response=self.whole())
        return created + self._event("response.in_progress", response=self.whole())

    def finished(self, n: int, choice: Choice, event: Finished) -> bytes:
        sent = self._events_of(event)
        if self._open is None and not self._items:
            sent += self._open_message()
        cut = event.reason is Reason.LENGTH
        sent += self._close("incomplete" if cut else "completed")
        self._output_tokens, self._cached_tokens = event.output_tokens, event.cached_tokens
        if event.times is not None:
            self._completed_at = event.times.finished // 1_000_000
        self._status = "cancelled" if event.reason is Reason.CANCELLED else "incomplete" if cut else "completed"
        return sent + self._event(f"response.{self._status}", response=self.whole())

    def ended(self, counts: tuple[int, int, int] | None) -> bytes:
        return DONE

    def failed(self, error: OrcaError) -> bytes:
        """An event with the number of the one before: a stream that is taken up behind it lacks none."""
        described = failure(error)[2]["error"]
        body = {**described, "type": "error", "sequence_number": max(self._number, 0), "error": described}
        return named_event("error", json.dumps(body))

    def fail(self, error: OrcaError) -> None:
        """The request has ended with an error."""
        self._status, self._error = "failed", error

    def whole(self) -> dict[str, Any]:
        assert self._kept is not None
        status, ended = self._status, self._status in {"completed", "incomplete"}
        items = [*self._items, *([self._grown("in_progress")] if self._open is not None else [])]
        failed = None if self._error is None else {"code": "server_error", "message": str(self._error)}
        usage = {
            "input_tokens": self._input_tokens,
            "input_tokens_details": {"cached_tokens": self._cached_tokens},
            "output_tokens": self._output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self._input_tokens + self._output_tokens,
        }
        return {
            "id": self._name,
            "object": "response",
            "created_at": self._kept.created_at,
            "completed_at": self._completed_at if status == "completed" else None,
            "status": status,
            "error": failed,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self._model,
            "output": items,
            "usage": usage if ended else None,
            **self._kept.fields,
        }

    # -- the parts
    def _event(self, kind: str, **body: Any) -> bytes:
        """The next event; empty where the client has it."""
        self._number += 1
        if self._number <= self._seen:
            return b""
        return named_event(kind, json.dumps({"type": kind, "sequence_number": self._number, **body}))

    def _shows(self, event: Token | Finished) -> bool:
        """Whether an event without a text is shown: with logprobs each token of a text is."""
        assert self._kept is not None
        if not self._kept.logprobs or isinstance(event, Finished) or event.logprob is None:
            return False
        in_text = self._open is None or self._open["type"] == "message"
        return in_text and not (event.said is not None and event.said.calls)

    def _text(self, content: str, event: Token | Finished) -> bytes:
        sent = self._open_message() if self._open is None else b""
        scores = list[dict[str, Any]]()
        if isinstance(event, Token) and self._shows(event):
            scores = self._logprobs.of([event])["content"]
        self._texts.append(content)
        self._scores += scores
        return sent + self._of_part("response.output_text.delta", delta=content, logprobs=scores)

    def _open_call(self, part: CallPart) -> bytes:
        sent = self._close("completed")
        self._open = {
            "id": f"fc_{self._key}_{part.at}",
            "type": "function_call",
            "status": "in_progress",
            "call_id": part.id,
            "name": part.name,
            "arguments": "",
        }
        return sent + self._event("response.output_item.added", output_index=len(self._items), item=self._open)

    def _arguments(self, piece: str) -> bytes:
        self._texts.append(piece)
        return self._of_item("response.function_call_arguments.delta", delta=piece)

    def _open_message(self) -> bytes:
        self._open = {
            "id": f"msg_{self._key}",
            "type": "message",
            "status": "in_progress",
            "role": "assistant",
            "content": [],
        }
        added = self._event("response.output_item.added", output_index=len(self._items), item=self._open)
        return added + self._of_part("response.content_part.added", part=text_part("", []))

    def _close(self, status: str) -> bytes:
        """Ends the item that grows, if there is one."""
        if self._open is None:
            return b""
        item = self._grown(status)
        if item["type"] == "message":
            (part,) = item["content"]
            sent = self._of_part("response.output_text.done", text=part["text"], logprobs=part["logprobs"])
            sent += self._of_part("response.content_part.done", part=part)
        else:
            done = "response.function_call_arguments.done"
            sent = self._of_item(done, name=item["name"], arguments=item["arguments"])
        sent += self._event("response.output_item.done", output_index=len(self._items), item=item)
        self._items.append(item)
        self._open, self._texts, self._scores = None, [], []
        return sent

    def _grown(self, status: str) -> dict[str, Any]:
        """The item that grows, as far as it has come."""
        assert self._open is not None
        said = "".join(self._texts)
        more = {"content": [text_part(said, self._scores)]} if self._open["type"] == "message" else {"arguments": said}
        return {**self._open, "status": status, **more}

    def _of_item(self, kind: str, **body: Any) -> bytes:
        assert self._open is not None
        return self._event(kind, item_id=self._open["id"], output_index=len(self._items), **body)

    def _of_part(self, kind: str, **body: Any) -> bytes:
        return self._of_item(kind, content_index=0, **body)


def text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def told_again(reply: ResponseReply, events: Sequence[Event], error: OrcaError | None) -> Mapping[str, Any]:
    """The object of a response whose request has had these events so far. error: that has ended it."""
    choice = Choice()
    for event in events:
        if isinstance(event, Accepted):
            reply.begun(0, choice, event)
        elif isinstance(event, Finished):
            reply.finished(0, choice, event)
        else:
            reply.shown(0, choice, [event])
    if error is not None:
        reply.fail(error)
    return reply.whole()
