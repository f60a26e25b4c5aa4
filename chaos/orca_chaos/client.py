"""A raw gRPC client that follows one request to its end and believes nothing: the other half of the promise.

It calls the generated stubs, not the client library, which would hide what chaos looks for. A call that breaks is
resumed at the next endpoint. What the contract forbids is a Violation.
"""

import asyncio
import hashlib
import itertools
import struct
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2

from orca.v1 import orca_pb2 as pb
from orca.v1.orca_pb2_grpc import OrcaStub

GRACE = 300  # seconds for which a request outlives its broken call: longer than any fault lasts
PATIENCE = 120.0  # seconds without any news, after which a stream counts as forgotten
PAUSE = 0.1  # seconds between calls that fail
OPTIONS = [
    ("grpc.keepalive_time_ms", 1000),  # a frozen endpoint is left after this and the timeout
    ("grpc.keepalive_timeout_ms", 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.ping_timeout_ms", 1000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 300),
    ("grpc.enable_retries", 0),
]
# What a caller answers with another call. DEADLINE_EXCEEDED is not among them: these calls have no deadline.
AGAIN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)


class Violation(Exception):
    """A promise is broken. The message says which, and for which request."""


class Poisoned(Violation):
    """A request ended because engines were lost with it three times. That is allowed when so many faults hit it."""


class Lost(Violation):
    """A request ended DATA_LOSS. That is allowed where a Redis that lags behind may become the primary."""


class Caller:
    """The endpoints, called in turn."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._channels = [grpc.aio.insecure_channel(address, options=OPTIONS) for address in addresses]
        self._stubs: list[Any] = [OrcaStub(channel) for channel in self._channels]
        self._turn = itertools.count()

    def stub(self) -> Any:
        """The next endpoint."""
        return self._stubs[next(self._turn) % len(self._stubs)]

    async def model(self) -> pb.GetModelResponse:
        return await self.stub().GetModel(pb.GetModelRequest(), timeout=PATIENCE, wait_for_ready=True)

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()


class Stream:
    """One request, from its first call to its end.

    tokens: those that came, in order; engine: that made the last one; accepted, queued: what the server has said.
    `calls` counts the calls.
    """

    def __init__(
        self,
        caller: Caller,
        request: pb.GenerateRequest,
        wanted: Sequence[int] | None = None,
        came: Callable[["Stream"], None] = lambda stream: None,
        again: Sequence[grpc.StatusCode] = AGAIN,
    ) -> None:
        """wanted: the tokens that must come; None: any. came: called after each message with new ones. again: statuses
        that are answered with another call."""
        self._caller, self._wanted, self._came, self._again = caller, wanted, came, again
        self._request = pb.GenerateRequest()
        self._request.CopyFrom(request)
        self._request.request_id = self.request_id = uuid.uuid4().hex
        self._request.detach_grace.CopyFrom(Duration(seconds=GRACE))
        self._attempt = 0
        self._rewind = 0  # tokens that the next Resume asks for again
        self._repeat: list[int] = []
        self._call: Any = None
        self.tokens: list[int] = []
        self.engine = ""
        self.accepted, self.queued = False, 0
        self.finished: pb.Finished | None = None
        self.calls = 0

    async def run(self) -> pb.Finished | None:
        """Returns the end of the stream. Raises Violation."""
        heard = time.monotonic()
        while self.finished is None:
            before = self.calls, len(self.tokens)
            try:
                async with asyncio.timeout(max(1.0, heard + PATIENCE - time.monotonic())) as limit:
                    await self._one_call(limit)
            except TimeoutError:
                raise self._violation(f"no news for {PATIENCE:.0f} s") from None
            except grpc.aio.AioRpcError as error:
                self._judge(error)
                await asyncio.sleep(PAUSE)
            if len(self.tokens) > before[1]:
                heard = time.monotonic()
            elif time.monotonic() - heard > PATIENCE:
                raise self._violation(f"no news for {PATIENCE:.0f} s in {self.calls} calls")
        return self.finished

    async def cancel(self) -> None:
        """Calls Cancel until an endpoint has answered. Raises Violation when none does."""
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            try:
                await self._caller.stub().Cancel(pb.CancelRequest(request_id=self.request_id), timeout=10)
                return
            except grpc.aio.AioRpcError as error:
                if error.code() not in (*self._again, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.NOT_FOUND):
                    raise self._violation(f"Cancel: {error.code().name}: {error.details()}") from None
            await asyncio.sleep(PAUSE)
        raise self._violation(f"Cancel: no endpoint has taken it for {PATIENCE:.0f} s")

    def leave(self, again: int) -> None:
        """Breaks the call of now. The stream resumes, and asks for the last `again` tokens once more."""
        self._rewind = min(again, len(self.tokens))
        if self._call is not None:
            self._call.cancel()

    async def repeated(self) -> None:
        """Reads the whole ended request once more, by Resume and by Generate. Raises Violation when it is another."""
        for request in (pb.ResumeRequest(request_id=self.request_id), self._request):
            again = Stream(self._caller, self._request, self.tokens)
            again._request.request_id = again.request_id = self.request_id
            again._attempt, again.accepted = self._attempt, isinstance(request, pb.ResumeRequest)
            await again.run()
            self._attempt = again._attempt
            if again.tokens != self.tokens:
                raise self._violation(f"it had {len(self.tokens)} tokens, and later {len(again.tokens)}")

    # -- one call

    async def _one_call(self, limit: asyncio.Timeout) -> None:
        stub, self._attempt = self._caller.stub(), max(self._attempt + 1, time.time_ns() // 1000)
        self.calls += 1
        if self.accepted:
            index = len(self.tokens) - self._rewind
            seen = struct.pack(f"<{index}I", *self.tokens[:index])
            self._repeat, self._rewind = self.tokens[index:], 0
            self._call = stub.Resume(
                pb.ResumeRequest(
                    request_id=self.request_id,
                    from_index=index,
                    attempt=self._attempt,
                    digest=hashlib.sha1(seen).digest(),
                )
            )
        else:
            self._request.attempt = self._attempt
            self._repeat = []
            self._call = stub.Generate(self._request)
        index = len(self.tokens) - len(self._repeat)
        try:
            while (message := await self._call.read()) is not grpc.aio.EOF:
                index = self._take(message, index)
                limit.reschedule(asyncio.get_running_loop().time() + PATIENCE)
            if self.finished is None:
                raise self._violation("its stream ended without `finished`, as OK")
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # by a timeout, or from outside
                self._call.cancel()
                raise
            # By `leave`: the call of gRPC was cancelled, not this task.

    def _take(self, message: pb.GenerateResponse, index: int) -> int:
        """Checks a message. Returns the index of the token that comes next."""
        if message.HasField("accepted"):
            self.accepted, self.queued = True, message.accepted.queue_position
        before = len(self.tokens)
        for token in message.tokens:
            if token.index != index:
                raise self._violation(f"token {token.index} came where {index} was due")
            if index < len(self.tokens):
                if token.token_id != self.tokens[index]:
                    raise self._violation(f"token {index} was {self.tokens[index]}, and came again as {token.token_id}")
            else:
                if self._wanted is not None and (index >= len(self._wanted) or token.token_id != self._wanted[index]):
                    raise self._violation(f"token {index} is {token.token_id}, undisturbed it is another")
                self.tokens.append(token.token_id)
                self.engine = token.engine
            index += 1
        if message.HasField("finished"):
            self._end(message.finished)
        if len(self.tokens) > before:
            self._came(self)
        return index

    def _end(self, finished: pb.Finished) -> None:
        if finished.output_tokens != len(self.tokens):
            raise self._violation(f"it ended with {finished.output_tokens} tokens, {len(self.tokens)} came")
        complete = len(self.tokens) == self._request.max_new_tokens
        if finished.reason == pb.FINISH_REASON_LENGTH and not complete:
            raise self._violation(f"it ended after {len(self.tokens)} of {self._request.max_new_tokens} tokens")
        self.finished = finished

    def _judge(self, error: grpc.aio.AioRpcError) -> None:
        """Judges a failed call: it leads to another call, or is a violation."""
        code = error.code()
        if code is grpc.StatusCode.CANCELLED and "Locally cancelled" in (error.details() or ""):
            return
        if code is grpc.StatusCode.ABORTED and self.calls > 1:
            # An older call of this client, which it believed to be dead, cannot speak here: this one was the newest.
            raise self._violation(f"its newest call ended ABORTED: {error.details()}")
        if code is grpc.StatusCode.INTERNAL and reason_of(error) == "ENGINES_LOST":
            raise Poisoned(f"request {self.request_id}: {error.details()}")
        if code is grpc.StatusCode.DATA_LOSS:
            raise Lost(f"request {self.request_id}: DATA_LOSS: {error.details()}")
        if code not in self._again:
            raise self._violation(f"{code.name}: {error.details()}")

    def _violation(self, sentence: str) -> Violation:
        state = f"{len(self.tokens)} of {self._request.max_new_tokens} tokens, {self.calls} calls"
        return Violation(f"request {self.request_id} ({state}): {sentence}")


def reason_of(error: grpc.aio.AioRpcError) -> str:
    """The reason of google.rpc.ErrorInfo; "" when the call did not reach Orca."""
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin" and isinstance(value, bytes):
            for detail in status_pb2.Status.FromString(value).details:
                info = error_details_pb2.ErrorInfo()
                if detail.Unpack(info):
                    return info.reason
    return ""
