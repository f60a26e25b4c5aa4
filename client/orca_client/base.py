"""The part that both clients share: settings, the arguments of a request, and a stream's knowledge of its request."""

import math
import random
import time
import uuid
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, get_args

import grpc

from .addresses import Addresses, targets_of
from .attempts import next_attempt
from .channels import Channels, Options, channel_options
from .errors import Cancelled, InvalidArgument, OrcaError
from .events import Accepted, Finished, FinishReason, Token
from .many import Answer, Prompt
from .patience import Patience
from .request import PriorityName, ToolChoice, Tools, generate_request
from .resumption import Resumption
from .routing import routed
from .tracing import Trace

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

S = TypeVar("S", bound="BaseStream")
F = TypeVar("F", bound=Callable[..., Any])
OnLeave = Literal["cancel", "detach"]

CONNECT_TIMEOUT = 10.0  # seconds until some endpoint must have answered
UNARY_TIMEOUT = 10.0  # seconds for Cancel and GetModel, over all tries
CLOSING_TIMEOUT = 2.0  # seconds for the Cancel of a stream that is closed before its end
MAX_INTERVAL = 256  # tokens of one message


def _unqualified(method: F) -> F:
    """Python's TypeError for a wrong argument names the method with its class, which no caller knows."""
    method.__qualname__ = method.__name__
    return method


class BaseClient(ABC, Generic[S]):
    """A client of one release of Orca. It spreads requests over the endpoints, and resumes where a call fails."""

    def __init__(
        self,
        addresses: str | Sequence[str],
        *,
        credentials: grpc.ChannelCredentials | None = None,
        api_key: str | None = None,
        metadata: Sequence[tuple[str, str]] = (),
        connect_timeout: float = CONNECT_TIMEOUT,
        fail_fast: bool = False,
        resume_timeout: float = 60.0,
        retry_when_full: bool = False,
        keepalive: float = 10.0,
        tracer: "Tracer | None" = None,
    ) -> None:
        """Connects at the first call. Raises InvalidArgument for an address that is not a gRPC target.

        addresses: one or several gRPC targets ("host:port", "dns:///name:port"). credentials: for TLS; None: plaintext.
        api_key: of the tenant that calls; goes with every call, as metadata does. connect_timeout: a stream ends as
        Unavailable when no endpoint has answered this client at all for this many seconds; as Unreachable when none
        could even be reached. fail_fast: do not wait for that where the cause is sure: nothing listens, the name does
        not resolve, a certificate is not trusted. It suits a person at a terminal; endpoints may be about to start.
        resume_timeout: the same, once one has answered: seconds without an open call since the last token. The error
        then has a note that says how to take the request up; math.inf waits for ever. retry_when_full: wait while the
        queue is full, as long as the request's timeout allows, instead of raising ResourceExhausted. keepalive: check a
        connection after this many seconds of silence; a frozen endpoint is noticed after one and a half times this.
        tracer: of OpenTelemetry; each request then has a span, whose context goes with its calls.
        """
        targets = targets_of(addresses)
        self._rng = random.Random()
        self._addresses = Addresses(targets, self._rng.randrange(len(targets)))
        self._connect_timeout, self._fail_fast, self._tracer = connect_timeout, fail_fast, tracer
        self._resume_timeout, self._retry_when_full = resume_timeout, retry_when_full
        new_channel, options = type(self)._new_channel, channel_options(keepalive)
        self._streams: weakref.WeakSet[S] = weakref.WeakSet()  # left when the client is closed
        if api_key is not None:
            metadata = (*metadata, ("authorization", f"Bearer {api_key}"))
        self._channels = Channels(
            self._addresses,
            metadata,
            lambda target: new_channel(target, credentials, options),
            tls=credentials is not None,
        )

    @_unqualified
    def generate(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        logprobs: bool = False,
        top_logprobs: int = 0,
        prompt_logprobs: bool = False,
        min_p: float = 0.0,
        repetition_penalty: float | None = None,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: Mapping[int, float] | None = None,
        json_schema: str | Mapping[str, Any] | None = None,
        regex: str | None = None,
        grammar: str | None = None,
        template_kwargs: Mapping[str, object] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: ToolChoice = "auto",
        tool_names: Sequence[str] = (),
        one_tool_call: bool = False,
        timeout: float | None = None,
        detach_grace: float = 30.0,
        request_id: str | None = None,
        model: str = "",
        stream_interval: int = 0,
        on_leave: OnLeave = "cancel",
        metadata: Sequence[tuple[str, str]] = (),
        priority: PriorityName = "normal",
    ) -> S:
        """Sends a request, and returns its stream of Accepted, Tokens and Finished.

        prompt: text, token ids, or the messages of a chat, each with role and content, for the model's chat template.
        max_new_tokens: 0 with messages is as many as the model or the server says. template_kwargs: variables for the
        template. tools: functions in OpenAI's form that the answer to messages may call; its text has the calls as the
        model spells them. tool_choice: "none" and "required" leave the model no choice. tool_names: those that may be
        called; empty: all. one_tool_call: one call at most. temperature: 0 is greedy. top_logprobs: each Token has this
        number of the most probable tokens at its place. prompt_logprobs: a Prompt comes before the first Token.
        logit_bias: token id -> what is added to its logit. json_schema, regex, grammar: one form at most, which the
        answer follows; a schema may be an object.
        `orca.proto` says what each parameter does. timeout: seconds for the whole request, with all its
        resumptions. detach_grace: seconds for which the request lives on without a call, so that it can be resumed.
        request_id: made when absent; one that the server knows with the same body gives the stream of that request.
        model: the name that the server must serve; empty: whichever it does. It goes with all calls of the request as
        metadata, too, by which a proxy finds its release. stream_interval: after the first token the server waits until
        it can send this number together, at most 256: cheaper where no person reads along. on_leave: "cancel" ends the
        request when its stream is left before the end, "detach" lets it live on. metadata: goes with the calls of this
        request. priority: its class: who goes first in the queue.

        Raises InvalidArgument for a value that its field cannot hold. What the server refuses is raised by the stream.
        """
        body = generate_request(
            request_id or uuid.uuid4().hex,
            prompt,
            template_kwargs=template_kwargs,
            tools=Tools(tools, tool_choice, tool_names, one_tool_call),
            max_new_tokens=max_new_tokens,
            sampling={
                "temperature": temperature,
                "top_k": top_k,
                "top_p": top_p,
                "seed": seed,
                "min_p": min_p,
                "repetition_penalty": repetition_penalty,
                "presence_penalty": presence_penalty,
                "frequency_penalty": frequency_penalty,
                "logit_bias": logit_bias,
            },
            stop=stop,
            stop_token_ids=stop_token_ids,
            ignore_eos=ignore_eos,
            logprobs=logprobs,
            top_logprobs=top_logprobs,
            prompt_logprobs=prompt_logprobs,
            detach_grace=detach_grace,
            model=model,
            stream_interval=stream_interval,
            form={"json_schema": json_schema, "regex": regex, "grammar": grammar},
            priority=priority,
        )
        _check_on_leave(on_leave)
        patience = self._patience(self._resume_timeout, timeout)
        trace = Trace(self._tracer, "orca.generate", body.request_id, (*routed(body.model), *metadata))
        resumption = Resumption(
            body.request_id,
            body,
            patience=patience,
            next_attempt=next_attempt,
            retry_when_full=self._retry_when_full,
            stream_interval=stream_interval,
            on_end=trace.end,
        )
        return self._open(resumption, trace, on_leave)

    @_unqualified
    def resume(
        self,
        request_id: str,
        from_index: int = 0,
        *,
        seen: Sequence[int] | None = None,
        timeout: float | None = None,
        model: str = "",
        stream_interval: int = 0,
        on_leave: OnLeave = "cancel",
        metadata: Sequence[tuple[str, str]] = (),
    ) -> S:
        """The stream of a request that was sent before, here or by another process, from token `from_index` on.

        The request's older stream ends as Aborted. seen: the ids of the tokens before `from_index`; the stream raises
        DataLoss when the server has others. model: the request's, where several releases share one address.
        stream_interval, on_leave, metadata: as in `generate`.
        """
        if not 0 <= stream_interval <= MAX_INTERVAL:
            raise InvalidArgument(f"stream_interval: must be from 0 to {MAX_INTERVAL}", "stream_interval")
        if from_index < 0 or (seen is not None and len(seen) != from_index):
            raise InvalidArgument("from_index: must be the number of tokens seen", "from_index")
        _check_on_leave(on_leave)
        patience = self._patience(self._resume_timeout, timeout)
        trace = Trace(self._tracer, "orca.resume", request_id, (*routed(model), *metadata))
        resumption = Resumption(
            request_id,
            None,
            patience=patience,
            next_attempt=next_attempt,
            from_index=from_index,
            seen=seen if from_index else (),
            stream_interval=stream_interval,
            on_end=trace.end,
        )
        return self._open(resumption, trace, on_leave)

    @abstractmethod
    def _open(self, resumption: Resumption, trace: Trace, on_leave: OnLeave) -> S:
        """Makes the stream, which makes the first call."""

    def _patience(self, bound: float, timeout: float | None) -> Patience:
        """bound: seconds without a working endpoint. timeout: seconds for everything."""
        _check_timeout(timeout)
        connect = None if self._channels.answered else self._connect_timeout
        return Patience(bound, time.monotonic(), timeout, self._rng, connect=connect, fail_fast=self._fail_fast)

    @staticmethod
    @abstractmethod
    def _new_channel(target: str, credentials: grpc.ChannelCredentials | None, options: Options) -> Any:
        """A gRPC channel to an endpoint."""


def _check_timeout(timeout: Any) -> None:
    """Raises InvalidArgument unless it is a number of seconds, or None."""
    if timeout is not None and not (isinstance(timeout, int | float) and 0 <= timeout < math.inf):
        raise InvalidArgument(f"timeout: must be a number of seconds; it is {timeout!r}", "timeout")


def _check_on_leave(on_leave: Any) -> None:
    """Raises InvalidArgument for any other word."""
    if on_leave not in get_args(OnLeave):
        raise InvalidArgument(f'on_leave: must be "cancel" or "detach"; it is {on_leave!r}', "on_leave")


class BaseStream:
    """A stream's knowledge of its request, in both clients."""

    def __init__(self, resumption: Resumption, trace: Trace, on_leave: OnLeave) -> None:
        self._resumption, self._trace, self.on_leave = resumption, trace, on_leave

    @property
    def request_id(self) -> str:
        """The id of the request, as the server knows it."""
        return self._resumption.request_id

    @property
    def accepted(self) -> Accepted | None:
        """The Accepted event, once it has come."""
        return self._resumption.accepted

    @property
    def tokens(self) -> Sequence[Token]:
        """The tokens that came so far."""
        return self._resumption.tokens

    @property
    def finished(self) -> Finished | None:
        """The Finished event, once it has come."""
        return self._resumption.finished

    def answer(self, position: int, prompt: Prompt, text: str, error: OrcaError | None) -> Answer:
        """The stream's end as the answer to one of many prompts."""
        finished = None if error is not None else self.finished
        return Answer(position, prompt, self.request_id, text, self.tokens, finished, error)

    def _end_trace(self) -> None:
        """The stream is left. Does nothing when its request has ended before."""
        self._trace.end(len(self._resumption.tokens), None, None)

    def _whole_text(self) -> str:
        """The text of a request that has finished. Raises Cancelled when the request or the stream was cut short."""
        finished = self._resumption.finished
        if finished is None:
            raise self._was_closed()
        if finished.reason is FinishReason.CANCELLED:
            error = Cancelled(f"request {self.request_id} was cancelled after {finished.output_tokens} tokens")
            error.reason = "REQUEST_CANCELLED"
            raise error
        return "".join(token.text for token in self._resumption.tokens) + finished.text

    def _was_closed(self) -> Cancelled:
        return Cancelled(f"request {self.request_id}: its stream was closed here")
