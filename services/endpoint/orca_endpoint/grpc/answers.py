"""Events as messages of orca.v1."""

import math

from orca.v1.orca_pb2 import FinishReason, GenerateResponse, GenerateTextResponse, PromptToken, Timings, TopToken
from orca.v1.orca_pb2 import Token as TokenMessage
from orca_pool.records import Times

from ..calls import events
from ..calls.events import Accepted, Event, Finished, Prompted, Token


class Encoder:
    """Turns events into serialized messages. One message serves all tokens, and is only told what has changed: protobuf
    keeps each text that it was ever given."""

    def __init__(self) -> None:
        self._response = GenerateResponse()
        self._token = self._response.tokens.add()
        self._text = self._engine = ""
        self._scored = False  # the last token had a logprob

    def encode(self, event: Event) -> bytes:
        if type(event) is Token:
            if event.top:
                return GenerateResponse(tokens=[token_message(event)]).SerializeToString()
            token = self._token
            token.index, token.token_id, text, logprob, token.iteration, engine, _, _ = event
            if text != self._text:
                token.text = self._text = text
            if engine != self._engine:
                token.engine = self._engine = engine
            if logprob is not None:
                token.logprob, self._scored = logprob, True
            elif self._scored:
                token.ClearField("logprob")
                self._scored = False
            return self._response.SerializeToString()
        response = GenerateResponse()
        if isinstance(event, Accepted):
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
        return response.SerializeToString()


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
