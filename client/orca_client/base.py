"""What the two clients share: their making, a request's arguments, what a stream knows, channel options."""

import random
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar, cast

import grpc

from orca.v1.orca_pb2_grpc import OrcaStub

from .addresses import Addresses
from .attempts import next_attempt
from .errors import Cancelled, InvalidArgument, OrcaError, Unavailable, error_of
from .events import Accepted, Finished, FinishReason, Token
from .patience import Patience
from .request import generate_request
from .resumption import Resumption

S = TypeVar("S", bound="BaseStream")

UNARY_TIMEOUT = 10.0  # seconds for Cancel and GetModel, over all tries
CLOSING_TIMEOUT = 2.0  # seconds for the Cancel of a stream that is closed before its end


class BaseClient(ABC, Generic[S]):
    """A client of one release of Orca over the addresses of its endpoints.

    `addresses`: one or several gRPC targets ("host:port", "dns:///name:port"). Requests are spread over them, and one
    whose call fails goes on at the next. `credentials`: for TLS (None: plaintext). `metadata` goes with every call.
    `resume_timeout`: seconds without a working endpoint after which a stream ends as Unavailable.
    `retry_when_full`: a full queue is waited for (as long as the request's timeout allows) instead of raised.
    `keepalive`: seconds of silence after which the connection is checked; a frozen endpoint costs about this and half.
    """

    def __init__(
        self,
        addresses: str | Sequence[str],
        *,
        credentials: grpc.ChannelCredentials | None = None,
        metadata: Sequence[tuple[str, str]] = (),
        resume_timeout: float = 60.0,
        retry_when_full: bool = False,
        keepalive: float = 10.0,
    ) -> None:
        targets = [addresses] if isinstance(addresses, str) else list(addresses)
        self._rng = random.Random()
        self._addresses = Addresses(targets, self._rng.randrange(max(1, len(targets))))
        self._credentials = credentials
        self._metadata = tuple(metadata)
        self._resume_timeout, self._retry_when_full = resume_timeout, retry_when_full
        self._keepalive = keepalive
        self._channels: list[Any] = []
        self._stubs: dict[str, OrcaStub] = {}
        self._closed = False

    def generate(
        self,
        prompt: str | Sequence[int],
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
        timeout: float | None = None,
        detach_grace: float = 30.0,
        request_id: str | None = None,
    ) -> S:
        """Sends a request, and returns its stream of Accepted, Tokens and Finished.

        `prompt` is text or token ids; temperature 0 is greedy. `timeout` bounds the whole request in seconds, over all
        resumptions. `detach_grace`: seconds for which the request lives on when its stream is dropped, so that it can
        be resumed. `request_id` is made when absent; with a known one and the same body, the stream is that request's.

        Raises InvalidArgument for values that the fields cannot hold; what the server refuses is raised by the stream.
        """
        body = generate_request(
            request_id or uuid.uuid4().hex,
            prompt,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            stop=stop,
            stop_token_ids=stop_token_ids,
            ignore_eos=ignore_eos,
            logprobs=logprobs,
            detach_grace=detach_grace,
        )
        return self._open(
            Resumption(
                body.request_id,
                body,
                patience=self._patience(self._resume_timeout, timeout),
                next_attempt=next_attempt,
                retry_when_full=self._retry_when_full,
            )
        )

    def resume(
        self, request_id: str, from_index: int = 0, *, seen: Sequence[int] | None = None, timeout: float | None = None
    ) -> S:
        """The stream of a request that was sent before, here or in another process, from token `from_index` on.

        `seen` are the ids of the tokens before it: another past is then DataLoss. Its older stream ends as Aborted.
        """
        if from_index < 0 or (seen is not None and len(seen) != from_index):
            raise InvalidArgument("from_index: must be the number of tokens seen", "from_index")
        return self._open(
            Resumption(
                request_id,
                None,
                patience=self._patience(self._resume_timeout, timeout),
                next_attempt=next_attempt,
                from_index=from_index,
                seen=seen if from_index else (),
            )
        )

    @abstractmethod
    def _open(self, resumption: Resumption) -> S:
        """Makes the first call and the stream."""

    def _patience(self, bound: float, timeout: float | None) -> Patience:
        now = time.monotonic()
        return Patience(bound, now, None if timeout is None else now + timeout, self._rng)

    def _pick(self) -> str:
        return self._addresses.pick(time.monotonic())

    def _error(self, failure: grpc.RpcError, target: str) -> OrcaError:
        """The error of a call to an endpoint that ended with this failure."""
        if self._closed:
            return Cancelled("the client was closed")
        error = error_of(failure.code(), failure.details(), cast(Any, failure.trailing_metadata()))
        error.__cause__ = failure
        if isinstance(error, Unavailable):
            self._addresses.failed(target, time.monotonic())
        return error

    def _stub(self, target: str) -> OrcaStub:
        """The stub of an endpoint; its channel is made at first use. Raises Cancelled when the client is closed."""
        if self._closed:
            raise Cancelled("the client was closed")
        if target not in self._stubs:
            self._channels.append(self._new_channel(target))
            self._stubs[target] = OrcaStub(self._channels[-1])
        return self._stubs[target]

    @abstractmethod
    def _new_channel(self, target: str) -> Any:
        """A gRPC channel to an endpoint."""

    def _channel_options(self) -> list[tuple[str, int]]:
        period = int(self._keepalive * 1000)
        return [
            ("grpc.keepalive_time_ms", period),
            ("grpc.keepalive_timeout_ms", period // 2),
            # The two that make it work on a stream that is silent both ways: without the first, pings stop after two;
            # without the second a frozen peer is noticed after a minute (grpcio 1.85, measured: 114 s instead of 1).
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.http2.ping_timeout_ms", period // 2),
            ("grpc.min_reconnect_backoff_ms", 3000),  # also how long one connection attempt may take
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 2000),
            ("grpc.enable_retries", 0),  # Patience alone decides
        ]


class BaseStream:
    """What a stream knows of its request."""

    def __init__(self, resumption: Resumption) -> None:
        self._resumption = resumption

    @property
    def request_id(self) -> str:
        return self._resumption.request_id

    @property
    def accepted(self) -> Accepted | None:
        return self._resumption.accepted

    @property
    def tokens(self) -> Sequence[Token]:
        """The tokens that came so far."""
        return self._resumption.tokens

    @property
    def finished(self) -> Finished | None:
        """The end of the request, when it has come."""
        return self._resumption.finished

    def _whole_text(self) -> str:
        finished = self._resumption.finished
        if finished is None:
            raise self._was_closed()
        if finished.reason is FinishReason.CANCELLED:
            raise Cancelled(f"request {self.request_id} was cancelled after {finished.output_tokens} tokens")
        return "".join(token.text for token in self._resumption.tokens) + finished.text

    def _was_closed(self) -> Cancelled:
        return Cancelled(f"request {self.request_id}: its stream was closed here")
