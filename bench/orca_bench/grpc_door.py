"""Orca's gRPC door for the bench: it notes when messages come, and parses them when their stream has ended.

A client takes its time from the cores that it measures. For a token grpc.aio's takes 30 us, this one 8 us.
"""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

import grpc

from orca.v1 import orca_pb2 as pb
from orca.v1.orca_pb2_grpc import OrcaStub
from orca_client.channels import channel_options
from orca_client.reach import cause_of
from orca_common.errors import FailedPrecondition
from orca_common.lanes.client import LaneConnection, Metadata, connect
from orca_common.lanes.connection import LEAVING

from .measures import Answer

GENERATE = "/orca.v1.Orca/Generate"
REFUSED = 0.002  # seconds. C-core counts a call for a moment after its client has seen its end, and refuses one more
GOAWAY, HEADER = 7, 9  # RFC 9113: the type of a frame, and the bytes before its payload


class DoorConnection(LaneConnection):
    """A connection whose open calls go on when the server has said GOAWAY, as each does after its `connection_age`.

    h2 takes no frame after a GOAWAY, so it does not get one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._part = b""  # of a frame that has not come whole

    def data_received(self, data: bytes) -> None:
        data, wanted, begin, at = self._part + data, b"", 0, 0
        while (end := at + HEADER + int.from_bytes(data[at : at + 3])) <= len(data):
            if data[at + 3] == GOAWAY:
                self.why_lost = self.why_lost or LEAVING
                wanted, begin = wanted + data[begin:at], end
            at = end
        self._part = data[at:]
        super().data_received(wanted + data[begin:at])


class GrpcDoor:
    """`Door` to an endpoint of Orca. It resumes nothing: a call that fails is an error.

    `patience`: seconds that the server may take to answer the first call, and to begin each. `interval`: the requests'
    `stream_interval`. `metadata` makes that of the next call. `sampling`: of the requests; None: greedy.
    """

    metadata: Callable[[], Metadata] = tuple
    sampling: pb.Sampling | None = None

    def __init__(self, address: str, label: str = "orca-grpc", patience: float = 10.0, interval: int = 1) -> None:
        self.address, self.label, self.patience, self.interval = address, label, patience, interval

    async def __aenter__(self) -> Self:
        """Connects. Raises FailedPrecondition when nobody answers."""
        async with grpc.aio.insecure_channel(self.address, channel_options(keepalive=30.0)) as channel:
            try:
                request = pb.GetModelRequest()
                self.model: pb.GetModelResponse = await OrcaStub(channel).GetModel(request, timeout=self.patience)
            except grpc.aio.AioRpcError as error:
                details = error.details() or error.code().name
                cause = cause_of(details, tls=False)
                why = cause.sentence if cause else details
                raise FailedPrecondition(f"address: {self.address} does not answer ({why})") from None
        self._connection = await connect(self.address, None, DoorConnection)
        self._calls = asyncio.Semaphore(self._connection.max_calls)
        self._connecting = asyncio.Lock()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._connection.close()

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    async def ask(self, answer: Answer, clock: Callable[[], float]) -> None:
        prompt, output = answer.request
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=prompt),
            max_new_tokens=output,
            ignore_eos=True,
            stream_interval=self.interval,
            sampling=self.sampling,
        )
        came: list[tuple[float, bytes]] = []
        async with self._calls:
            last = clock() + self.patience
            while True:
                try:
                    connection = await self._connected()
                except OSError as error:
                    answer.error, answer.ended = f"it cannot be reached again ({error})", clock()
                    return
                call = connection.call(GENERATE, lambda message: came.append((clock(), message)), self.metadata())
                call.send(request.SerializeToString())
                call.close()
                try:
                    status = await call.over
                finally:
                    call.cancel()  # where the load's patience is over
                if not call.refused or clock() > last:
                    break
                await asyncio.sleep(REFUSED)
        answer.ended = clock()
        answer.error = "" if status.code is grpc.StatusCode.OK else str(status)
        for moment, message in came:  # parsed only now: the clock of the other streams does not wait for it
            event = pb.GenerateResponse.FromString(message)
            if event.tokens:
                answer.came.append(moment)
                answer.made += [token.token_id for token in event.tokens]
            if event.HasField("finished"):
                answer.tokens = event.finished.output_tokens

    async def _connected(self) -> LaneConnection:
        """The connection. A server tells its clients every few minutes to come again; open streams go on over the old
        one."""
        async with self._connecting:
            if self._connection.why_lost:
                self._connection = await connect(self.address, None, DoorConnection)
        return self._connection
