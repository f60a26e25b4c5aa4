"""The events of a stream and the answer of GetModel: messages of orca.v1 as frozen dataclasses of the same names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from google.protobuf.duration_pb2 import Duration

from orca.v1 import orca_pb2 as pb


class FinishReason(StrEnum):
    """The reason why a generation ended: orca.v1.FinishReason without its prefix."""

    UNSPECIFIED = "UNSPECIFIED"
    LENGTH = "LENGTH"  # max_new_tokens tokens were made
    EOS = "EOS"  # the model's end-of-sequence token
    STOP_TOKEN = "STOP_TOKEN"  # one of stop_token_ids
    STOP = "STOP"  # one of the stop strings
    CANCELLED = "CANCELLED"  # Cancel was called


@dataclass(frozen=True, slots=True)
class Accepted:
    """The first event: from now on the request survives the death of any process."""

    request_id: str
    input_tokens: int
    queue_position: int  # requests before this one in the queue
    starts_in: float | None = (
        None  # seconds until it leaves the queue, as predicted; None: it left, or no engine knows its pace
    )
    weights: str = ""  # fingerprint of those that made its tokens, as in Engine; "" while it has none


@dataclass(frozen=True, slots=True)
class TopToken:
    """One of the most probable tokens at a place. `text` is that of this token alone."""

    token_id: int
    text: str
    logprob: float


@dataclass(frozen=True, slots=True)
class PromptToken:
    """One token of the prompt, and how probable it was after those before it."""

    token_id: int
    text: str
    logprob: float | None  # None for the first token, which follows nothing
    top: tuple[TopToken, ...]


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt's tokens with their logprobs: just before token 0 of a request with `prompt_logprobs`."""

    tokens: tuple[PromptToken, ...]


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token. `text` holds the characters that this token completed; it may be empty."""

    index: int  # 0 is the first generated token
    token_id: int
    text: str
    logprob: float | None  # natural logarithm; None unless the request asked for logprobs
    iteration: int
    engine: str
    top: tuple[TopToken, ...] = ()  # the most probable tokens at this place, of a request with `top_logprobs`


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds since the pool accepted the request, by the pool's clock. 0: it did not happen."""

    claimed: float
    first_token: float
    finished: float


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a generation. `text` holds the characters that were still held back."""

    reason: FinishReason
    output_tokens: int  # of the whole request, with the tokens before a Resume
    text: str
    timings: Timings
    cached_tokens: int = 0  # of the prompt: their keys and values were there, so they were not computed


Event = Accepted | Prompt | Token | Finished


@dataclass(frozen=True, slots=True)
class Engine:
    """One copy of the model: tensor_parallel x pipeline_parallel ranks."""

    id: str
    tensor_parallel: int
    pipeline_parallel: int
    slots: int
    epoch: int
    weights: str  # fingerprint of its weights


@dataclass(frozen=True, slots=True)
class Model:
    """The model that a release serves, its limits and its engines."""

    name: str
    digest: str
    vocab_size: int
    max_positions: int  # the limit of input tokens + max_new_tokens
    max_prompt_bytes: int
    max_stop_strings: int
    max_stop_bytes: int
    eos_token_ids: tuple[int, ...]
    has_tokenizer: bool  # False: prompts are token ids, and Token.text is empty
    engines: tuple[Engine, ...]
    has_chat_template: bool = False  # False: a prompt cannot be messages
    # What its generation_config.json says of sampling: values of `generate`'s arguments, by their names.
    sampling_defaults: Mapping[str, float] = field(default_factory=dict[str, float])
    tool_syntax: str = ""  # how it spells calls of tools; empty: messages cannot have tools


_PREFIX = "FINISH_REASON_"
_REASONS = {number: FinishReason(name.removeprefix(_PREFIX)) for name, number in pb.FinishReason.items()}


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9


def _timings(timings: Timings) -> pb.Timings:
    """The message. What did not happen is absent there, and 0 here."""
    message = pb.Timings()
    for name in ("claimed", "first_token", "finished"):
        if seconds := getattr(timings, name):
            getattr(message, name).FromNanoseconds(round(seconds * 1e9))
    return message


def accepted_of(message: pb.Accepted) -> Accepted:
    """The Accepted of a message."""
    starts_in = _seconds(message.starts_in) if message.HasField("starts_in") else None
    return Accepted(message.request_id, message.input_tokens, message.queue_position, starts_in, message.weights)


def token_of(message: pb.Token) -> Token:
    """The Token of a message."""
    logprob = message.logprob if message.HasField("logprob") else None
    top = _top_of(message.top) if message.top else ()
    return Token(message.index, message.token_id, message.text, logprob, message.iteration, message.engine, top)


def prompt_of(messages: Sequence[pb.PromptToken]) -> Prompt:
    """The Prompt of a response's messages."""
    return Prompt(
        tuple(
            PromptToken(
                message.token_id,
                message.text,
                message.logprob if message.HasField("logprob") else None,
                _top_of(message.top),
            )
            for message in messages
        )
    )


def _top_of(messages: Sequence[pb.TopToken]) -> tuple[TopToken, ...]:
    return tuple([TopToken(message.token_id, message.text, message.logprob) for message in messages])


def finished_of(message: pb.Finished) -> Finished:
    """The Finished of a message. A reason that this client does not know yet is UNSPECIFIED."""
    times = message.timings
    timings = Timings(_seconds(times.claimed), _seconds(times.first_token), _seconds(times.finished))
    reason = _REASONS.get(message.reason, FinishReason.UNSPECIFIED)
    return Finished(reason, message.output_tokens, message.text, timings, message.cached_tokens)


def model_of(message: pb.GetModelResponse) -> Model:
    """The Model of a message."""
    return Model(
        name=message.name,
        digest=message.digest,
        vocab_size=message.vocab_size,
        max_positions=message.max_positions,
        max_prompt_bytes=message.max_prompt_bytes,
        max_stop_strings=message.max_stop_strings,
        max_stop_bytes=message.max_stop_bytes,
        eos_token_ids=tuple(message.eos_token_ids),
        has_tokenizer=message.has_tokenizer,
        engines=tuple(
            Engine(one.id, one.tensor_parallel, one.pipeline_parallel, one.slots, one.epoch, one.weights)
            for one in message.engines
        ),
        has_chat_template=message.has_chat_template,
        sampling_defaults={one.name: value for one, value in message.sampling_defaults.ListFields()},
        tool_syntax=message.tool_syntax,
    )


def _top_messages(top: Sequence[TopToken]) -> list[pb.TopToken]:
    return [pb.TopToken(token_id=one.token_id, text=one.text, logprob=one.logprob) for one in top]


def message_of(event: Event) -> pb.Accepted | pb.GenerateResponse | pb.Token | pb.Finished:
    """The message that an event came from, for protobuf's JSON. That of a Prompt is a response with nothing else."""
    match event:
        case Accepted():
            accepted = pb.Accepted(
                request_id=event.request_id,
                input_tokens=event.input_tokens,
                queue_position=event.queue_position,
                weights=event.weights,
            )
            if event.starts_in is not None:
                accepted.starts_in.FromNanoseconds(round(event.starts_in * 1e9))
            return accepted
        case Token():
            return pb.Token(
                index=event.index,
                token_id=event.token_id,
                text=event.text,
                logprob=event.logprob,
                iteration=event.iteration,
                engine=event.engine,
                top=_top_messages(event.top),
            )
        case Prompt():
            return pb.GenerateResponse(
                prompt=[
                    pb.PromptToken(
                        token_id=token.token_id, text=token.text, logprob=token.logprob, top=_top_messages(token.top)
                    )
                    for token in event.tokens
                ]
            )
        case Finished():
            return pb.Finished(
                reason=f"{_PREFIX}{event.reason}",
                output_tokens=event.output_tokens,
                text=event.text,
                timings=_timings(event.timings),
                cached_tokens=event.cached_tokens,
            )
