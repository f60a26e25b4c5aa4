"""OpenAI's answers of `POST /v1/chat/completions`: from events to JSON, whole or in chunks."""

import json
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ...calls.events import Accepted, Event, Finished, PromptToken, Token
from ...text.tool_calls import CallPart, merged
from ..answer import Choice, UsageIn, finish_reason, finite
from ..stream import ChoiceChunks

ROLE = "assistant"


class Logprobs:
    """Makes OpenAI's `logprobs` of tokens. `bytes_of` gives the bytes of one token alone, `spell` its text."""

    def __init__(self, spell: Callable[[int], str], bytes_of: Callable[[int], bytes]) -> None:
        self._spell, self._bytes_of = spell, bytes_of

    def of(self, places: Sequence[PromptToken | Token]) -> dict[str, Any]:
        content = [
            self._one(place.token_id, place.logprob)
            | {"top_logprobs": [self._one(top.token_id, top.logprob) for top in place.top]}
            for place in places
            if place.logprob is not None
        ]
        return {"content": content, "refusal": None}

    def _one(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._spell(token_id),
            "logprob": finite(logprob),
            "bytes": list(self._bytes_of(token_id)),
        }


class ChatChunks(ChoiceChunks):
    """The chunks of a chat: the role first, then the text as it comes, then the end."""

    def __init__(self, name: str, model: str, usage_in: UsageIn, numbered: bool, logprobs: Logprobs | None) -> None:
        """As `ChoiceChunks`. logprobs: None when no chunk has any."""
        super().__init__(name, "chat.completion.chunk", model, usage_in, numbered)
        self._logprobs = logprobs

    def begun(self, n: int, choice: Choice, accepted: Accepted) -> bytes:
        """The role, unless the client has seen a part of the answer before."""
        return b"" if choice.shown_tokens else self._delta(n, choice, {"role": ROLE, "content": ""})

    def shown(self, n: int, choice: Choice, piece: Sequence[Event]) -> bytes:
        tokens = [event for event in piece if type(event) is Token]
        if not tokens:
            return b""
        choice.shown_tokens = tokens[-1].at + 1
        delta = delta_of(tokens)
        shows = self._logprobs is not None and tokens[0].logprob is not None
        if not delta and not shows:
            return b""
        logprobs = self._logprobs.of(tokens) if shows and self._logprobs is not None else None
        return self._delta(n, choice, delta or {"content": ""}, logprobs)

    def finished(self, n: int, choice: Choice, event: Finished) -> bytes:
        delta, seen = delta_of([event]), choice.seen_end
        held = self._delta(n, choice, delta, end=1) if delta and seen < 1 else b""
        return held + (self._delta(n, choice, {}, reason=finish_reason(event), end=2) if seen < 2 else b"")

    def _delta(
        self,
        n: int,
        choice: Choice,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        reason: str | None = None,
        end: int = 0,
    ) -> bytes:
        body = {"index": n, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return self.chunk(choice, json.dumps(body), end)


def delta_of(events: Sequence[Token | Finished]) -> dict[str, Any]:
    """The text and the parts of calls that events add to a message. Empty where they add nothing."""
    delta: dict[str, Any] = {}
    if text := "".join([event.text if event.said is None else event.said.content for event in events]):
        delta["content"] = text
    if parts := merged([part for event in events if event.said is not None for part in event.said.calls]):
        delta["tool_calls"] = [
            {"index": part.at, **call_of(part)}
            if part.id
            else {"index": part.at, "function": {"arguments": part.arguments}}
            for part in parts
        ]
    return delta


def call_of(call: CallPart) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def message_of(choice: Choice) -> dict[str, Any]:
    """The assistant's message. Without a text beside its calls the content is null."""
    content, calls = "".join(choice.texts), merged(choice.calls)
    message = {"role": ROLE, "content": content if content or not calls else None, "refusal": None}
    return message | ({"tool_calls": [call_of(call) for call in calls]} if calls else {})


def chat_completion(
    name: str, model: str, choices: Iterable[Choice], counts: dict[str, int], logprobs: Logprobs | None
) -> dict[str, Any]:
    """The whole answer of a request that does not stream. counts: its usage. logprobs: None when not asked for."""
    return {
        "id": name,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [
            {
                "index": n,
                "message": message_of(choice),
                "logprobs": logprobs.of(choice.tokens) if logprobs is not None else None,
                "finish_reason": choice.finish,
            }
            for n, choice in enumerate(choices)
        ],
        "usage": counts,
    }
