"""The parts of OpenAI's answers that all methods have: choices, usage, ends, and headers."""

import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

from starlette.responses import Response

from orca_common.errors import Cancelled
from orca_common.service import in_thread
from orca_pool.records import Reason

from ..calls.events import Accepted, Event, Finished, Prompted, PromptToken, Token
from ..requests.forms import LeftOut
from ..text.tool_calls import CallPart

ID_HEADER, RELAXED_HEADER = "X-Orca-Request", "X-Orca-Relaxed"
LONGEST_HEADER = 2000  # characters
SCORES_IN_LOOP = 512  # tokens with logprobs that are written on the event loop
SPOKEN = "".join(map(chr, range(0x21, 0x7F))).replace("%", "").replace(";", "")  # in headers as it is

Numbered = AsyncIterator[tuple[int, list[Event]]]  # events that are there together, with the number of their choice


def finish_reason(event: Finished) -> str:
    if event.reason is Reason.LENGTH:
        return "length"
    return "tool_calls" if event.called else "stop"


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> dict[str, Any]:
    """cached_tokens: of the prompts, which were not computed; told where there are some."""
    details = {"prompt_tokens_details": {"cached_tokens": cached_tokens}} if cached_tokens else {}
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        **details,
    }


class UsageIn(NamedTuple):
    """The chunks of a stream that have a usage."""

    end: bool = False  # one of its own, the last
    each: bool = False


class SeenTo(NamedTuple):
    """A client's place in a stream: the id of an event, and where a stream is taken up. Behind the last token
    come one or two events more: a text that was held back, as the beginning of a stop string, and the end."""

    tokens: int
    end: int = 0  # of these events

    def __str__(self) -> str:
        return f"{self.tokens}.{self.end}" if self.end else str(self.tokens)


class Choice:
    """One generation for a prompt, as it grows."""

    def __init__(self, echoed: str | None = None) -> None:
        self.echoed = echoed  # the prompt's text, for a request with echo
        self.texts: list[str] = [echoed or ""]
        self.calls: list[CallPart] = []  # of a chat's answer
        self.tokens: list[PromptToken | Token] = []  # with echo the prompt's come first
        self.offset = 0  # characters given out
        self.input_tokens = self.output_tokens = self.cached_tokens = 0
        self.finish: str | None = None
        self.shown_tokens = 0  # tokens that a stream has shown, and so what it resumes from
        self.seen_end = 0  # events behind them that the client has seen before

    @property
    def mean_logprob(self) -> float:
        """The mean logprob of the generated tokens."""
        logprobs = [token.logprob for token in self.tokens if isinstance(token, Token) and token.logprob is not None]
        return sum(logprobs) / len(logprobs) if logprobs else -math.inf

    def add(self, event: Token | Finished) -> None:
        """The text, or the calls, of a choice that is not streamed."""
        if event.said is None:
            self.texts.append(event.text)
        else:
            self.texts.append(event.said.content)
            self.calls += event.said.calls

    def end(self, event: Finished) -> None:
        """The end of a choice that is not streamed."""
        self.add(event)
        self.output_tokens, self.cached_tokens = event.output_tokens, event.cached_tokens
        self.finish = finish_reason(event)


def finite(logprob: float) -> float:
    """JSON has no infinity: what is impossible gets OpenAI's -9999."""
    return logprob if logprob > -math.inf else -9999.0


async def gather(
    events: Numbered, choices: Sequence[Choice], name: str, keep: bool, more: Mapping[str, str]
) -> dict[str, str]:
    """Fills the choices of an answer that is not streamed, and returns its headers. Raises Cancelled.

    keep: the choices keep their tokens, for logprobs. more: headers.
    """
    headers: dict[str, str] = {}
    async for n, piece in events:
        choice = choices[n]
        for event in piece:
            if isinstance(event, Token):
                choice.add(event)
                if keep:
                    choice.tokens.append(event)
            elif isinstance(event, Accepted):
                choice.input_tokens = event.input_tokens
                headers = {**headers_of(name, event), **more}
            elif isinstance(event, Prompted):
                choice.tokens += event.tokens
            else:
                check_whole(event, name)
                choice.end(event)
    return headers


async def written(choices: Sequence[Choice], write: Callable[[], Response]) -> Response:
    """A whole answer, by `write`, which takes 3 us for each token with logprobs; many of them in a thread."""
    return write() if sum(len(one.tokens) for one in choices) <= SCORES_IN_LOOP else await in_thread(write)


def headers_of(name: str, accepted: Accepted) -> dict[str, str]:
    """The answer's id, by which its stream is taken up again, and where it stands when it is accepted: requests before
    it, and seconds until it begins, if that is known."""
    headers = {ID_HEADER: name, "X-Queue-Position": str(accepted.queue_position)}
    if accepted.starts_in is not None:
        headers["X-Queue-Seconds"] = f"{accepted.starts_in:.1f}"
    return headers


def relaxed_header(left_out: Sequence[LeftOut], text: str = "response_format") -> dict[str, str]:
    """The header that says to which keywords of which schemas an answer is not held; none where it is held to all.

    text: the caller's name of the text's schema.
    """
    if not left_out:
        return {}
    shown, length = list[str](), 0
    for n, (function, place) in enumerate(left_out):
        shown.append(quote(f"{function or text}:{place or '.'}", safe=SPOKEN))
        length += len(shown[-1]) + 2
        if length > LONGEST_HEADER:
            shown[-1] = f"and {len(left_out) - n} more"
            break
    return {RELAXED_HEADER: "; ".join(shown)}


def check_whole(event: Finished, name: str) -> None:
    """Raises Cancelled for a request that was cancelled: OpenAI has no finish_reason for a part of an answer."""
    if event.reason is Reason.CANCELLED:
        raise Cancelled(f"request {name} was cancelled")
