"""Continues one request over many calls. Pure: no I/O, no clock; `now` is in seconds of any monotonic clock.

A driver (`client.py`, `aio.py`) makes the call that `call` returns, gives each response to `take`, and shows what
`event` returns until it returns None. When the call fails, `failed` returns how long to wait before the next call, or
raises the error that ends the request:

    call -> (take -> event*)* -> failed -> wait -> call -> (take -> event*)* -> .. -> finished
"""

import hashlib
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from orca.v1 import orca_pb2 as pb
from orca.v1.orca_pb2 import GenerateRequest, GenerateResponse, ResumeRequest

from .errors import DataLoss, DeadlineExceeded, NotFound, OrcaError, ResourceExhausted, Unavailable
from .events import Accepted, Event, Finished, Prompt, Token, accepted_of, finished_of, prompt_of, token_of
from .patience import Patience

OnEnd = Callable[[int, Finished | None, OrcaError | None], None]


@dataclass(frozen=True)
class Call:
    """The call to make next. The request's type decides the rpc. `timeout`: the rest of the request's, in seconds."""

    request: GenerateRequest | ResumeRequest
    timeout: float | None


class Resumption:
    """A client's knowledge of one request (whether it was accepted, its tokens, its end), which decides the next call.

    A request with a body is sent by Generate, again and again until the server accepts it; its id makes all of them one
    request. After that, and always for a request without a body, the call is Resume from the first token not seen. A
    request that the server has lost before a token of it was shown is sent by Generate again.
    """

    def __init__(
        self,
        request_id: str,
        body: GenerateRequest | None,
        *,
        patience: Patience,
        next_attempt: Callable[[], int],
        retry_when_full: bool = False,
        from_index: int = 0,
        seen: Sequence[int] | None = (),
        stream_interval: int = 0,
        on_end: OnEnd | None = None,
    ) -> None:
        """body: None for a request that was sent before. next_attempt: gives each call a higher number.

        retry_when_full: wait while the queue is full. from_index: the first token to ask for. seen: the ids of the
        tokens before it; None: they are not known, and no digest is sent. stream_interval: of Resume; Generate's is
        in the body. on_end: called when `ended` becomes true, with the number of tokens, Finished or None, the error or
        None.
        """
        self.request_id = request_id
        self.accepted: Accepted | None = None
        self.tokens: list[Token] = []
        self.finished: Finished | None = None
        self._body, self._patience, self._next_attempt = body, patience, next_attempt
        self._forgotten = False  # the server does not know the request any more
        self._retry_when_full = retry_when_full
        self._from_index, self._seen, self._interval = from_index, seen, stream_interval
        self.error: OrcaError | None = None  # that ended the request for this client
        self._on_end = on_end
        self._parts: deque[pb.Accepted | Prompt | pb.Token | pb.Finished] = deque()  # came, and not shown yet
        self._prompted = False  # a Prompt was shown

    @property
    def ended(self) -> bool:
        """Whether the stream is over: the request has finished, or an error ended it for this client."""
        return self.finished is not None or self.error is not None

    def call(self, now: float) -> Call:
        """The next call. Raises DeadlineExceeded, or the error that has ended the request already."""
        if self.error is not None:
            raise self.error
        timeout = self._patience.remaining(now)
        if self._body is not None and (self.accepted is None or self._forgotten):
            self._body.attempt = self._next_attempt()
            return Call(self._body, timeout)
        request = ResumeRequest(
            request_id=self.request_id,
            from_index=self._from_index + len(self.tokens),
            attempt=self._next_attempt(),
            digest=self._digest(),
            stream_interval=self._interval,
        )
        return Call(request, timeout)

    def take(self, response: GenerateResponse, now: float) -> None:
        """Takes a response. `event` names its content."""
        if response.HasField("accepted"):
            self._patience.working(now)
            self._forgotten = False
            self._parts.append(response.accepted)
        if response.prompt:
            self._parts.append(prompt_of(response.prompt))
        self._parts.extend(response.tokens)
        if response.HasField("finished"):
            self._parts.append(response.finished)

    def event(self) -> Event | None:
        """The next event to show. None: all that came was shown.

        Raises DataLoss when a token is missing or has changed.
        """
        while self._parts:
            match self._parts.popleft():
                case pb.Token() as message:
                    token = self._token(message)
                    if token is not None:
                        return token
                case pb.Accepted() as message:
                    if self.accepted is None:  # and not of a later call
                        self.accepted = accepted_of(message)
                        return self.accepted
                case Prompt() as prompt:
                    if not self._prompted:  # by a call that broke before token 0
                        self._prompted = True
                        return prompt
                case pb.Finished() as message:
                    return self._finish(message)
        return None

    def failed(self, error: OrcaError, now: float) -> float:
        """Seconds to wait before `call`. Raises the error when the request must not be tried again."""
        try:
            if isinstance(error, DeadlineExceeded) and not error.answered:
                raise self._patience.expired()
            if isinstance(error, Unavailable):
                return self._patience.failed(error, now)
            if isinstance(error, ResourceExhausted) and self._retry_when_full and error.retry_after is not None:
                return self._patience.refused(error, error.retry_after, now)
            if self._may_begin_again(error):
                self._forgotten = True
                return 0.0
            raise error
        except OrcaError as ending:
            if isinstance(ending, Unavailable) and self.accepted is not None:
                goes_on = f"resume({self.request_id!r}, {self._from_index + len(self.tokens)})"
                ending.add_note(f"{goes_on} takes the request up while it lives; a longer resume_timeout waits longer")
            self.error = ending
            self._tell_end()
            raise

    def _may_begin_again(self, error: OrcaError) -> bool:
        """Whether Generate may send a lost request again. None of its tokens was shown, so none can differ."""
        unknown = isinstance(error, NotFound) and (not error.answered or error.reason == "UNKNOWN_REQUEST")
        shown = self._from_index + len(self.tokens)
        return unknown and self._body is not None and self.accepted is not None and not shown and not self._forgotten

    def broken(self) -> Unavailable:
        """The error of a call that ended without a failure although the request had not finished."""
        return Unavailable(f"request {self.request_id}: the stream ended before its last event")

    # -- parts of `event` and `call`
    def _token(self, message: pb.Token) -> Token | None:
        """The token, unless it was shown before."""
        place = message.index - self._from_index - len(self.tokens)
        if place == 0:
            self._patience.progress()
            token = token_of(message)
            self.tokens.append(token)
            return token
        known = len(self.tokens) + place  # where in `tokens` it was
        if place > 0 or (known >= 0 and self.tokens[known].token_id != message.token_id):
            raise self._loss(f"token {message.index} came where {self._from_index + len(self.tokens)} was due")
        return None

    def _finish(self, message: pb.Finished) -> Finished:
        finished = finished_of(message)
        if finished.output_tokens != self._from_index + len(self.tokens):
            shown = self._from_index + len(self.tokens)
            raise self._loss(f"the request ended with {finished.output_tokens} tokens, but {shown} were shown")
        self.finished = finished
        self._tell_end()
        return finished

    def _loss(self, problem: str) -> DataLoss:
        error = DataLoss(f"request {self.request_id}: {problem}")
        self.error = error
        self._parts.clear()
        self._tell_end()
        return error

    def _tell_end(self) -> None:
        if self._on_end is not None:
            self._on_end(len(self.tokens), self.finished, self.error)

    def _digest(self) -> bytes:
        """SHA-1 of the ids of all tokens seen, each as 4 bytes little-endian. Made once a call, not once a token."""
        ids = [*(self._seen or ()), *(token.token_id for token in self.tokens)]
        if self._seen is None or not ids:
            return b""
        return hashlib.sha1(struct.pack(f"<{len(ids)}I", *ids), usedforsecurity=False).digest()
