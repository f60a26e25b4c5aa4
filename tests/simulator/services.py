"""The real endpoint and scheduler as simulated processes."""

import asyncio
import hashlib
from typing import Any, cast

from orca.v1.pool_pb2 import PoolRequest
from orca_common.errors import OrcaError, Unavailable
from orca_common.metrics import Metrics
from orca_common.service import LoopPulse, cancel
from orca_common.telemetry import Telemetry
from orca_common.tls import Transport
from orca_endpoint.calls.call import Call, CallLimits, Submission
from orca_endpoint.calls.delivery import Delivery
from orca_endpoint.calls.metrics import CallMetrics, Meter
from orca_endpoint.calls.transcript import Transcript
from orca_endpoint.requests.arrivals import Arrivals
from orca_endpoint.requests.validation import Work
from orca_endpoint.text.vocabulary import Vocabulary
from orca_pool.pool import Pool
from orca_pool.records import BY_ARRIVAL, NO_LIMITS
from orca_pool.retry import reached
from orca_scheduler.discovery.static import StaticDiscovery
from orca_scheduler.scheduler import Scheduler
from orca_scheduler.settings import SchedulerSettings

from .clients import Stream
from .oracle import END, Letters
from .processes import World
from .server import ModelledPool, Server
from .workers import DIGEST, Network

MAX_WAITING = 1000


class EndpointProcess:
    """One life of an endpoint: its delivery, and the calls that it serves."""

    def __init__(self, world: World, server: Server, name: str) -> None:
        self.world, self.name = world, name
        self.process = world.process(name)
        self.pool = cast(Pool, ModelledPool(server, self.process))
        self.delivery: Delivery | None = None
        self.arrivals: Arrivals | None = None
        self.metrics = CallMetrics(Metrics("endpoint"))
        self.streams: dict[Stream, asyncio.Task[None] | None] = {}  # None: it has not begun
        self.process.on_death.append(self._died)
        self.process.start(self._run)

    async def _run(self) -> None:
        await reached(lambda: self.pool.identify(DIGEST, 1024, 64))
        numbers = iter(range(1, 1 << 30))
        self.arrivals = Arrivals()
        self.delivery = Delivery(self.pool, self.process.time, lambda: f"{self.name}.{next(numbers)}")
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.delivery.renew())
            tasks.create_task(self.delivery.read())

    def call(self, stream: Stream) -> None:
        """A client's call arrives."""
        if not self.process.alive or self.delivery is None or self.delivery.leaving:
            stream.put(_away(f"{self.name} is not there"))
            return
        stream.leave = lambda: self._left(stream)
        self.streams[stream] = None
        self.process.call_soon(self._begin, stream)

    def _begin(self, stream: Stream) -> None:
        task = self.streams[stream] = asyncio.get_running_loop().create_task(self._serve(stream))
        if stream.ask.deadline is not None:
            self.process.call_later(stream.ask.deadline, task.cancel)

    def _left(self, stream: Stream) -> None:
        def cancel() -> None:
            if (task := self.streams.get(stream)) is not None:
                task.cancel()

        if self.process.alive:
            self.process.call_soon(cancel)

    def _died(self) -> None:
        for stream in self.streams:
            stream.put(_away(f"{self.name} is gone"))

    async def _serve(self, stream: Stream) -> None:
        ask = stream.ask
        try:
            async with self._call(stream) as call:
                async for piece in call.pieces():
                    stream.put(piece)
                    if ask.slow:
                        await asyncio.sleep(ask.slow)
            stream.put(None)
        except OrcaError as error:
            stream.put(error)
        finally:
            self.streams.pop(stream, None)

    def _call(self, stream: Stream) -> Call:
        ask = stream.ask
        assert self.delivery is not None
        assert self.arrivals is not None
        deadline = None if ask.deadline is None else self.process.time() + ask.deadline
        submission = None
        if ask.prompt:
            record = PoolRequest(
                request_id=ask.request_id,
                prompt_ids=ask.prompt,
                max_new_tokens=ask.max_new_tokens,
                end_token_ids=[END] if ask.ends else [],
                detach_grace=ask.grace,
                stop=[ask.stop] if ask.stop else [],
            )
            digest = hashlib.sha1(record.SerializeToString()).hexdigest()
            work = Work(record, digest, ask.attempt)
            submission = Submission(
                work, work.upfront(None), b"", deadline, MAX_WAITING, NO_LIMITS, "", BY_ARRIVAL, self.arrivals
            )
        letters = cast(Vocabulary, Letters())
        transcript = Transcript(ask.request_id, letters, from_index=ask.from_index, digest=ask.digest)
        return Call(
            self.pool,
            self.delivery,
            CallLimits(pool_patience=10.0, buffer=8),
            transcript,
            attempt=ask.attempt,
            submission=submission,
            deadline=deadline,
            meter=Meter(self.metrics, "", 0.0),
        )

    def cancel(self, request_id: str) -> None:
        """A client's Cancel arrives."""
        if self.process.alive and self.delivery is not None:
            self.process.start(lambda: self._cancel(request_id))

    async def _cancel(self, request_id: str) -> None:
        await reached(lambda: self.pool.cancel(request_id))

    def leave(self) -> None:
        """Drains, and ends."""
        self.process.start(self._leave)

    async def _leave(self) -> None:
        if self.delivery is not None:
            self.delivery.end_calls()
            await self.delivery.idle()
            await self.delivery.settled(3.0)
            await reached(self.delivery.leave)
        self.process.kill()


def _away(why: str) -> OrcaError:
    return Unavailable(why)


class SchedulerProcess:
    """One life of a scheduler."""

    def __init__(
        self,
        world: World,
        server: Server,
        name: str,
        network: Network,
        settings: dict[str, Any],
        telemetry: Telemetry,
    ) -> None:
        self.world, self.name = world, name
        self.process = world.process(name)
        self._pool = cast(Pool, ModelledPool(server, self.process))
        self._pods = [pod for engine in network.engines.values() for pod in engine.pods]
        # The ranks of the simulation hold whole rows of blocks of their own.
        self._settings = SchedulerSettings(workers=",".join(self._pods), policy="paper", **settings)
        self._transport, self._telemetry = cast(Transport, network), telemetry
        self.scheduler: Scheduler | None = None
        self.process.start(self._run)

    def _ended(self, name: str) -> bool:
        """As the kernel says it of a process of the same machine: every other scheduler is on this one."""
        same = int(name[-1], 36) % 2 == int(self.name[-1], 36) % 2
        return same and not any(process.name == name for process in self.world.processes)

    async def _run(self) -> None:
        discovery = StaticDiscovery(self._pods, self._settings.shape.pods)
        self.scheduler = Scheduler(
            self.name,
            self._ended,
            self._pool,
            discovery,
            self._settings,
            self._telemetry,
            LoopPulse(),
            self._transport,
            Metrics("scheduler"),
        )
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(discovery.run(self.scheduler.discovered)),
            loop.create_task(self.scheduler.run()),
        ]
        await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()

    def leave(self) -> None:
        self.process.start(self._leave)

    async def _leave(self) -> None:
        if self.scheduler is not None:
            await cancel(*self._tasks)
            await self.scheduler.leave()
        self.process.kill()
