"""OpenAI's answers of `POST /v1/completions`: from events to JSON, whole or in chunks."""

import json
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ...calls.events import Accepted, Event, Finished, Prompted, PromptToken, Token
from ..answer import Choice, UsageIn, finish_reason, finite
from ..stream import ChoiceChunks

KIND = "text_completion"


class Logprobs:
    """Makes OpenAI's `logprobs` of tokens. `spell` gives the text of one token alone."""

    def __init__(self, spell: Callable[[int], str]) -> None:
        self._spell = spell

    def of(self, places: Sequence[PromptToken | Token], offset: int, within: str | None = None) -> dict[str, Any]:
        """Of tokens whose text begins at `offset`. within: the whole text, where some tokens have no text in it, as one
        that the tokenizer puts before every prompt."""
        offsets = []
        for place in places:
            offsets.append(offset)
            offset += len(place.text) if within is None else length_in(within, place.text, offset)
        return {
            "tokens": [self._spell(place.token_id) for place in places],
            "token_logprobs": [None if place.logprob is None else finite(place.logprob) for place in places],
            "top_logprobs": [self._top(place) for place in places],
            "text_offset": offsets,
        }

    def _top(self, place: PromptToken | Token) -> dict[str, float] | None:
        """The most probable tokens, the likeliest first, and the token itself: one more when it is not among them."""
        if place.logprob is None:
            return None  # the first token of a prompt
        top: dict[str, float] = {}
        for one in place.top:
            top.setdefault(self._spell(one.token_id), finite(one.logprob))
        if all(one.token_id != place.token_id for one in place.top):
            top.setdefault(self._spell(place.token_id), finite(place.logprob))
        return top


def length_in(text: str, piece: str, at: int) -> int:
    """The characters of a token's text that stand at a place of the whole text: without the space that a tokenizer puts
    before a text's first word, and none of a special token."""
    for found in (piece, piece.lstrip(" ")):
        if text.startswith(found, at):
            return len(found)
    return 0


class CompletionChunks(ChoiceChunks):
    """The chunks of a completion."""

    def __init__(self, name: str, model: str, usage_in: UsageIn, numbered: bool, logprobs: Logprobs | None) -> None:
        """As `ChoiceChunks`. logprobs: None when no chunk has any."""
        super().__init__(name, KIND, model, usage_in, numbered)
        self._logprobs = logprobs

    def begun(self, n: int, choice: Choice, accepted: Accepted) -> bytes:
        """The echoed prompt, unless it waits for its logprobs."""
        return self._text(n, choice, choice.echoed or "", None) if self._logprobs is None else b""

    def shown(self, n: int, choice: Choice, piece: Sequence[Event]) -> bytes:
        """The tokens, after an echoed prompt with its logprobs."""
        sent, logprobs = b"", self._logprobs
        if logprobs is not None and choice.echoed is not None:
            for event in piece:
                if isinstance(event, Prompted):
                    sent = self._text(n, choice, choice.echoed, logprobs.of(event.tokens, 0, choice.echoed))
        tokens = [event for event in piece if type(event) is Token]
        if not tokens:
            return sent
        choice.shown_tokens = tokens[-1].at + 1
        shows = logprobs is not None and tokens[0].logprob is not None
        of_tokens = logprobs.of(tokens, choice.offset) if shows and logprobs is not None else None
        return sent + self._text(n, choice, "".join([token.text for token in tokens]), of_tokens)

    def finished(self, n: int, choice: Choice, event: Finished) -> bytes:
        return (
            self._chunk(n, choice, event.text, "null", json.dumps(finish_reason(event)), 2)
            if choice.seen_end < 2
            else b""
        )

    def _text(self, n: int, choice: Choice, text: str, logprobs: dict[str, Any] | None) -> bytes:
        """The chunk of a text; empty when it has nothing to show."""
        if not text and logprobs is None:
            return b""
        choice.offset += len(text)
        return self._chunk(n, choice, text, "null" if logprobs is None else json.dumps(logprobs), "null")

    def _chunk(self, n: int, choice: Choice, text: str, logprobs: str, reason: str, end: int = 0) -> bytes:
        body = f'{{"index":{n},"text":{json.dumps(text)},"logprobs":{logprobs},"finish_reason":{reason}}}'
        return self.chunk(choice, body, end)


def completion(
    name: str, model: str, shown: Iterable[Choice], counts: dict[str, int], logprobs: Logprobs | None
) -> dict[str, Any]:
    """The whole answer of a request that does not stream. counts: its usage. logprobs: None when not asked for."""
    return {
        "id": name,
        "object": KIND,
        "created": int(time.time()),
        "model": model,
        "choices": [
            {
                "index": n,
                "text": "".join(choice.texts),
                "logprobs": logprobs.of(choice.tokens, 0, "".join(choice.texts)) if logprobs is not None else None,
                "finish_reason": choice.finish,
            }
            for n, choice in enumerate(shown)
        ],
        "usage": counts,
    }
