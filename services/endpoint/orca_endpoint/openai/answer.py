"""OpenAI's answers: from events to JSON, whole or as server-sent events."""

import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from orca_pool.records import Reason

from ..calls.events import Finished, PromptToken, Token


def finish_reason(reason: Reason) -> str:
    return "length" if reason is Reason.LENGTH else "stop"


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


class Choice:
    """One generation for a prompt, as it grows."""

    def __init__(self, echoed: str | None = None) -> None:
        self.echoed = echoed  # the prompt's text, for a request with echo
        self.texts: list[str] = [echoed or ""]
        self.tokens: list[PromptToken | Token] = []  # with echo the prompt's come first
        self.offset = 0  # characters given out
        self.input_tokens = self.output_tokens = 0
        self.finish: str | None = None
        self.shown_tokens = 0  # tokens that a stream has shown, and so what it resumes from

    @property
    def mean_logprob(self) -> float:
        """The mean logprob of the generated tokens."""
        logprobs = [token.logprob for token in self.tokens if isinstance(token, Token) and token.logprob is not None]
        return sum(logprobs) / len(logprobs) if logprobs else -math.inf


class Logprobs:
    """Makes OpenAI's `logprobs` of tokens. `spell` gives the text of one token alone."""

    def __init__(self, spell: Callable[[int], str]) -> None:
        self._spell = spell

    def of(self, places: Sequence[PromptToken | Token], offset: int) -> dict[str, Any]:
        """Of tokens whose text begins at `offset`."""
        offsets = []
        for place in places:
            offsets.append(offset)
            offset += len(place.text)
        return {
            "tokens": [place.text for place in places],
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
            top.setdefault(one.text, finite(one.logprob))
        if all(one.token_id != place.token_id for one in place.top):
            top.setdefault(self._spell(place.token_id), finite(place.logprob))
        return top


def finite(logprob: float) -> float:
    """JSON has no infinity: what is impossible gets OpenAI's -9999."""
    return logprob if logprob > -math.inf else -9999.0


class Chunks:
    """Turns events into server-sent events. Constant parts are made once, so a chunk costs one small json.dumps.

    numbered: each event has an id, the number of tokens that the stream has shown by then; only of a single choice.
    """

    def __init__(self, completion_id: str, model: str, include_usage: bool, numbered: bool) -> None:
        head = {"id": completion_id, "object": "text_completion", "created": int(time.time()), "model": model}
        self._head = json.dumps(head)[:-1]
        self._usage = ',"usage":null' if include_usage else ""
        self._numbered = numbered

    def text(self, n: int, choice: Choice, text: str, logprobs: dict[str, Any] | None) -> bytes:
        """The chunk of a text; empty when it has nothing to show."""
        if not text and logprobs is None:
            return b""
        choice.offset += len(text)
        return self._chunk(n, choice, text, "null" if logprobs is None else json.dumps(logprobs), "null")

    def finished(self, n: int, choice: Choice, event: Finished) -> bytes:
        return self._chunk(n, choice, event.text, "null", json.dumps(finish_reason(event.reason)))

    def usage(self, prompt_tokens: int, completion_tokens: int) -> bytes:
        counts = json.dumps(usage(prompt_tokens, completion_tokens))
        return f'data: {self._head},"choices":[],"usage":{counts}}}\n\n'.encode()

    def _chunk(self, n: int, choice: Choice, text: str, logprobs: str, reason: str) -> bytes:
        number = f"id: {choice.shown_tokens}\n" if self._numbered else ""
        body = f'{{"index":{n},"text":{json.dumps(text)},"logprobs":{logprobs},"finish_reason":{reason}}}'
        return f'{number}data: {self._head},"choices":[{body}]{self._usage}}}\n\n'.encode()


def completion(
    completion_id: str, model: str, shown: Iterable[Choice], counts: dict[str, int], logprobs: Logprobs | None
) -> dict[str, Any]:
    """The whole answer of a request that does not stream. counts: its usage. logprobs: None when not asked for."""
    return {
        "id": completion_id,
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [
            {
                "index": n,
                "text": "".join(choice.texts),
                "logprobs": logprobs.of(choice.tokens, 0) if logprobs is not None else None,
                "finish_reason": choice.finish,
            }
            for n, choice in enumerate(shown)
        ],
        "usage": counts,
    }
