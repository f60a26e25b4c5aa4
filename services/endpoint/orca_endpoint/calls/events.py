"""A call's events for its client: Accepted once, Prompted once where asked for, each Token once and in order,
Finished once.

Both doors turn these events into their own messages. A stream that ends in any other way ends with an OrcaError.
"""

from typing import NamedTuple

from orca_pool.records import Reason, Times

from ..text.tool_calls import Said


class Accepted(NamedTuple):
    """The request is on the pool's disk."""

    request_id: str
    input_tokens: int
    queue_position: int  # requests before this one in the queue
    starts_in: float | None = None  # seconds until it leaves the queue, as predicted; None: it left, or nobody knows
    weights: str = ""  # fingerprint of those that made its tokens; "" while it has none
    kept: bytes = b""  # what was kept beside the request; empty: nothing
    adapter: str = ""  # that makes its tokens; "": the model alone


class TopToken(NamedTuple):
    """One of the most probable tokens at a place."""

    token_id: int
    text: str  # of this token alone
    logprob: float


class PromptToken(NamedTuple):
    """A token of the prompt."""

    token_id: int
    text: str
    logprob: float | None  # after the tokens before it; None for the first one
    top: tuple[TopToken, ...]


class Prompted(NamedTuple):
    """The prompt's tokens and their logprobs, for a request that asks for them: just before token 0."""

    tokens: list[PromptToken]


class Token(NamedTuple):
    """One committed token. A tuple, because one is made for each token of every stream."""

    at: int  # its index in the stream, from 0 (`index` is a method of every tuple)
    token_id: int
    text: str  # the characters that this token completed; may be empty
    logprob: float | None  # natural logarithm; None unless the request asked for it
    iteration: int
    engine: str
    top: tuple[TopToken, ...] = ()  # the most probable tokens at this place, where asked for
    said: Said | None = None  # the text without calls, and the calls, for a request whose answer may have some


class Finished(NamedTuple):
    """The end of a stream that was not ended by an error."""

    reason: Reason  # at most Reason.CANCELLED
    output_tokens: int  # of the whole request
    text: str  # characters that were held back
    times: Times | None
    said: Said | None = None  # as a token's, of the text that was held back
    cached_tokens: int = 0  # of the prompt: they were not computed
    called: bool = False  # the answer has calls, and all of them are whole
    stop: str | None = None  # the stop string that has ended the text


Event = Accepted | Prompted | Token | Finished
