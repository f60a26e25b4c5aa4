"""Events as messages of orca.v1."""

import math
from collections.abc import Sequence

from orca.v1.orca_pb2 import FinishReason, GenerateResponse, GenerateTextResponse, PromptToken, Timings, TopToken
from orca.v1.orca_pb2 import Token as TokenMessage
from orca_pool.records import Times

from ..calls import events
from ..calls.events import Accepted, Event, Finished, Prompted, Token

MOST_KEPT = 8  # tokens of a message that is kept


class Kept:
    """A message of some tokens, which is filled again and again."""

    __slots__ = ("engines", "response", "scored", "texts", "tokens")

    def __init__(self, size: int) -> None:
        self.response = GenerateResponse()
        self.tokens = [self.response.tokens.add() for _ in range(size)]
        self.texts, self.engines = [""] * size, [""] * size
        self.scored = False  # some tokens may have a logprob


class Encoder:
    """Turns the events of one stream into serialized messages. Messages are kept by their number of tokens, and only
    told what has changed: protobuf keeps each text that it was ever given."""

    def __init__(self) -> None:
        self._kept: dict[int, Kept] = {}

    def encode(self, events: Sequence[Event]) -> bytes:
        """The message of events that come together. One of several takes 0.3 us a token less than one for each."""
        if len(events) > MOST_KEPT:
            parts = range(0, len(events), MOST_KEPT)
            return b"".join([self.encode(events[first : first + MOST_KEPT]) for first in parts])
        kept = self._kept.get(len(events))
        if kept is None:
            kept = self._kept[len(events)] = Kept(len(events))
        if kept.scored:
            for token in kept.tokens:
                token.ClearField("logprob")
            kept.scored = False
        for n, (event, token) in enumerate(zip(events, kept.tokens, strict=True)):
            if type(event) is not Token or event.top:
                # Serialized messages one after the other are one message: protobuf merges them.
                if len(events) > 1:
                    return b"".join([self.encode((one,)) for one in events])
                return message(event).SerializeToString()
            token.index, token.token_id, text, logprob, token.iteration, engine, _, _ = event
            if text != kept.texts[n]:
                token.text = kept.texts[n] = text
            if engine != kept.engines[n]:
                token.engine = kept.engines[n] = engine
            if logprob is not None:
                token.logprob, kept.scored = logprob, True
        return kept.response.SerializeToString()


def message(event: Event) -> GenerateResponse:
    """The message of one event."""
    response = GenerateResponse()
    if isinstance(event, Token):
        response.tokens.append(token_message(event))
    elif isinstance(event, Accepted):
        accepted = response.accepted
        accepted.request_id, accepted.input_tokens, accepted.queue_position = event[:3]
        accepted.weights = event.weights
        if event.starts_in is not None:
            accepted.starts_in.FromMilliseconds(round(event.starts_in * 1000))
    elif isinstance(event, Prompted):
        response.prompt.extend(prompt_messages(event))
    elif isinstance(event, Finished):
        finished = response.finished
        finished.reason = reason_of(event)
        finished.output_tokens, finished.text = event.output_tokens, event.text
        finished.cached_tokens = event.cached_tokens
        if event.times is not None:
            finished.timings.CopyFrom(timings(event.times))
    return response


def add(event: Event, answer: GenerateTextResponse, texts: list[str], logprobs: bool) -> None:
    """Adds an event to an answer that is not streamed; its text to `texts`."""
    if isinstance(event, Token):
        answer.token_ids.append(event.token_id)
        texts.append(event.text)
        if logprobs:
            answer.logprobs.append(math.nan if event.logprob is None else event.logprob)
        if event.top:
            answer.tokens.append(token_message(event))
    elif isinstance(event, Accepted):
        answer.request_id, answer.input_tokens = event.request_id, event.input_tokens
    elif isinstance(event, Prompted):
        answer.prompt.extend(prompt_messages(event))
    else:
        answer.reason, answer.cached_tokens = reason_of(event), event.cached_tokens
        texts.append(event.text)
        if event.times is not None:
            answer.timings.CopyFrom(timings(event.times))


def reason_of(event: Finished) -> FinishReason:
    """FinishReason's numbers are the first five of records.Reason."""
    return event.reason.value  # pyright: ignore[reportReturnType]


def timings(times: Times) -> Timings:
    """The durations since the submission, without those that did not happen."""
    message = Timings()
    for name in ("claimed", "first_token", "finished"):
        moment = getattr(times, name)
        if moment:
            getattr(message, name).FromMicroseconds(max(moment - times.submitted, 0))
    return message


def token_message(event: events.Token) -> TokenMessage:
    """A token with the most probable ones at its place."""
    index, token_id, text, logprob, iteration, engine, top, _ = event
    return TokenMessage(
        index=index,
        token_id=token_id,
        text=text,
        logprob=logprob,
        iteration=iteration,
        engine=engine,
        top=top_messages(top),
    )


def prompt_messages(event: events.Prompted) -> list[PromptToken]:
    return [
        PromptToken(token_id=token_id, text=text, logprob=logprob, top=top_messages(top))
        for token_id, text, logprob, top in event.tokens
    ]


def top_messages(top: tuple[events.TopToken, ...]) -> list[TopToken]:
    return [TopToken(token_id=token_id, text=text, logprob=logprob) for token_id, text, logprob in top]
