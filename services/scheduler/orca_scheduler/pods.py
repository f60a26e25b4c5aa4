"""A pod as the master of its engine sees it: the supervisor's table of ranks, and its hand on them."""

import asyncio
import logging
from collections.abc import Callable

import grpc

from orca.v1 import worker_pb2 as pb
from orca.v1.worker_pb2_grpc import SupervisorStub
from orca_common.service import cancel

from .channels import DIAL_SECONDS, dial, reason

log = logging.getLogger(__name__)
REDIAL_SECONDS = 0.2


class Pod:
    """`changed` is called after every news of the pod: a new table, or that its supervisor is away."""

    def __init__(self, address: str, changed: Callable[[], None]) -> None:
        self.address, self._changed = address, changed
        self.table: list[pb.RankEntry] | None = None  # None: not heard of yet
        self.away: str | None = None  # why its supervisor cannot be heard now
        self._channel = dial(address)
        self._supervisor = SupervisorStub(self._channel)
        self._watching = asyncio.create_task(self._watch(), name=f"pod {address}")

    async def close(self) -> None:
        await cancel(self._watching)
        await self._channel.close()

    async def fence(self, local_rank: int, pid: int, verdict: str) -> None:
        """Has a rank killed, if that process still lives. Returns when it has ended, or this was tried in vain."""
        request = pb.FenceRequest(local_rank=local_rank, pid=pid, verdict=verdict)
        try:
            await self._supervisor.Fence(request, timeout=DIAL_SECONDS)
        except grpc.aio.AioRpcError as error:
            log.warning("fenced in vain", extra={"pod": self.address, "error": reason(error)})

    async def _watch(self) -> None:
        while True:
            try:
                async for table in self._supervisor.Watch(pb.WatchRequest(), wait_for_ready=True):
                    self.table, self.away = list(table.ranks), None
                    self._changed()
                self.away = "it ended its list of ranks"
            except grpc.aio.AioRpcError as error:
                self.away = reason(error)
            self._changed()
            await asyncio.sleep(REDIAL_SECONDS)
