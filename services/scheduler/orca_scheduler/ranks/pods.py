"""A pod as the master of its engine sees it: its supervisor reports its ranks, and kills a fenced one."""

import asyncio
import logging
from collections.abc import Callable

import grpc

from orca.v1 import worker_pb2 as pb
from orca.v1.worker_pb2_grpc import SupervisorStub
from orca_common.tls import Transport

from .. import timers
from .answers import problem_of_table
from .channels import dial, reason

log = logging.getLogger(__name__)


class Pod:
    """The connection to one supervisor. `seen` gets each new table of ranks, `away` the reason for a missing one."""

    def __init__(
        self, address: str, transport: Transport, seen: Callable[[], None], away: Callable[[str], None]
    ) -> None:
        self._address, self._transport, self._seen, self._away = address, transport, seen, away
        self.table: dict[int, pb.RankEntry] = {}  # by the rank's number in the pod
        self._dial()

    def _dial(self) -> None:
        self._channel = dial(self._address, self._transport)
        self._supervisor = SupervisorStub(self._channel)

    async def watch(self) -> None:
        """Keeps the table current. Never ends by itself."""
        while True:
            watch = self._supervisor.Watch(pb.WatchRequest(), wait_for_ready=True)
            try:
                async with asyncio.timeout(timers.REACH):
                    await watch.wait_for_connection()
                async for table in watch:
                    if problem := problem_of_table(table.ranks):
                        watch.cancel()
                        self._away(f"its list of ranks has {problem}")
                        break
                    self.table = {entry.local_rank: entry for entry in table.ranks}
                    self._seen()
                else:
                    self._away("it ended its list of ranks")
            except grpc.aio.AioRpcError as error:
                self._away(reason(error))
            except TimeoutError:  # not reached yet: a new channel shows the certificate that we have by now
                await self._channel.close()
                self._dial()
            await asyncio.sleep(timers.REDIAL)

    async def fence(self, local_rank: int, pid: int, verdict: str) -> None:
        """Has a process killed, if it still lives. Returns when it has ended, or the supervisor could not be asked."""
        request = pb.FenceRequest(local_rank=local_rank, pid=pid, verdict=verdict)
        try:
            await self._supervisor.Fence(request, timeout=timers.DIAL)
        except grpc.aio.AioRpcError as error:
            log.warning("fence failed", extra={"pod": self._address, "error": reason(error)})

    async def close(self) -> None:
        await self._channel.close()
