"""A message of Anthropic's API as it grows: its events, and its object."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from orca_common.errors import OrcaError
from orca_pool.records import Reason

from ..calls.events import Accepted, Event, Finished, Token
from ..http.errors import in_messages
from ..openai.answer import Choice
from ..openai.replies import Reply, named_event
from ..requests.tools import object_of
from ..text.tool_calls import CallPart


class MessageReply(Reply):
    """One message."""

    def __init__(self, name: str, model: str, streams: bool, spell: Callable[[int], str]) -> None:
        """name: its id. streams: its events are wanted. spell: gives the text of one token alone."""
        self._name, self._model, self._streams, self._spell = name, model, streams, spell
        self._last: int | None = None  # token
        self._blocks = list[tuple[dict[str, Any], str]]()  # those that are whole, with their texts or arguments
        self._open: dict[str, Any] | None = None  # the block that grows
        self._pieces = list[str]()  # of its text, or of its arguments
        self._input_tokens = self._output_tokens = self._cached_tokens = 0
        self._reason: str | None = None
        self._stop: str | None = None

    def begun(self, n: int, choice: Choice, accepted: Accepted) -> bytes:
        self._input_tokens = accepted.input_tokens
        return self._event("message_start", message=self.whole())

    def shown(self, n: int, choice: Choice, piece: Sequence[Event]) -> bytes:
        self._last = next((event.token_id for event in reversed(piece) if isinstance(event, Token)), self._last)
        return super().shown(n, choice, piece)

    def finished(self, n: int, choice: Choice, event: Finished) -> bytes:
        sent = self._events_of(event) + self._close()
        self._output_tokens, self._cached_tokens, self._stop = event.output_tokens, event.cached_tokens, event.stop
        if event.reason is Reason.STOP_TOKEN and self._last is not None:  # a stop sequence that is a special token
            self._stop = self._spell(self._last)
        self._reason = stop_reason(event)
        delta = {"stop_reason": self._reason, "stop_sequence": self._stop}
        sent += self._event("message_delta", delta=delta, usage=self._usage())
        return sent + self._event("message_stop")

    def ended(self, counts: tuple[int, int, int] | None) -> bytes:
        return b""

    def failed(self, error: OrcaError) -> bytes:
        return named_event("error", json.dumps(in_messages(error)))

    def whole(self) -> dict[str, Any]:
        return {
            "id": self._name,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [with_text(*block) for block in self._blocks],
            "stop_reason": self._reason,
            "stop_sequence": self._stop,
            "usage": self._usage(),
        }

    # -- the parts
    def _usage(self) -> dict[str, int]:
        return {
            "input_tokens": self._input_tokens - self._cached_tokens,  # as Anthropic counts them
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self._cached_tokens,
            "output_tokens": self._output_tokens,
        }

    def _event(self, kind: str, **body: Any) -> bytes:
        return named_event(kind, json.dumps({"type": kind, **body})) if self._streams else b""

    def _text(self, content: str, event: Token | Finished) -> bytes:
        sent = self._begin({"type": "text", "text": ""}) if self._open is None else b""
        return sent + self._delta({"type": "text_delta", "text": content}, content)

    def _open_call(self, part: CallPart) -> bytes:
        return self._close() + self._begin({"type": "tool_use", "id": part.id, "name": part.name, "input": {}})

    def _arguments(self, piece: str) -> bytes:
        return self._delta({"type": "input_json_delta", "partial_json": piece}, piece)

    def _begin(self, block: dict[str, Any]) -> bytes:
        self._open = block
        return self._event("content_block_start", index=len(self._blocks), content_block=block)

    def _delta(self, delta: dict[str, Any], piece: str) -> bytes:
        self._pieces.append(piece)
        return self._event("content_block_delta", index=len(self._blocks), delta=delta)

    def _close(self) -> bytes:
        """Ends the block that grows, if there is one."""
        if self._open is None:
            return b""
        sent = self._event("content_block_stop", index=len(self._blocks))
        self._blocks.append((self._open, "".join(self._pieces)))
        self._open, self._pieces = None, []
        return sent


def with_text(block: dict[str, Any], said: str) -> dict[str, Any]:
    """A whole block with its text, or its arguments as an object, which are closed where they were cut. Raises
    FailedPrecondition."""
    return {**block, "text": said} if block["type"] == "text" else {**block, "input": object_of(said)}


def stop_reason(event: Finished) -> str:
    """Anthropic's word for an end."""
    match event.reason:
        case Reason.LENGTH:
            return "max_tokens"
        case Reason.STOP | Reason.STOP_TOKEN:
            return "stop_sequence"
        case _:
            return "tool_use" if event.called else "end_turn"
