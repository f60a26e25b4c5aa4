"""The scheduler service from start to end."""

import asyncio
import contextlib
import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from orca_common import service
from orca_common.address import join_address
from orca_common.errors import OrcaError, Unavailable
from orca_common.metrics import Metrics
from orca_common.service import Answer, LoopPulse, Query, StatusPort
from orca_common.telemetry import Telemetry
from orca_common.tls import transport_of
from orca_pool.outage import Outage
from orca_pool.pool import Pool
from orca_pool.retry import reached

from .discovery.candidates import Discovery, Scaled
from .discovery.static import StaticDiscovery
from .explain.telling import as_json
from .presence import Presence
from .scaler import Scaler
from .scheduler import Scheduler
from .settings import SchedulerSettings

log = logging.getLogger(__name__)
EXPLAIN_SECONDS = 10.0


class SchedulerApp:
    """One scheduler process, as `service.serve` runs it."""

    def __init__(self, settings: SchedulerSettings) -> None:
        """Raises FailedPrecondition when the list of workers holds a part of an engine, or tls_dir cannot be used."""
        self._presence = Presence()
        name = self._presence.name
        self._settings, self._loop = settings, asyncio.get_running_loop()
        if settings.policy_for(()).prefix == "shared":
            log.warning("prefix=shared: the time to a first token tells each caller of all others' prompts")
        self._telemetry = Telemetry("orca-scheduler", name, share=settings.trace_share, slow=settings.trace_slow)
        pulse = LoopPulse()
        self._pool = Pool.of(settings)
        self._outage = Outage(asyncio.get_running_loop().time)  # until the pool has answered for the first time
        self._discovery, scaled = discovery_of(settings, self._refusals)
        transport, metrics = transport_of(settings.tls_dir), Metrics("scheduler")
        self._scheduler = Scheduler(
            *(name, self._presence.ended, self._pool, self._discovery, settings),
            *(self._telemetry, pulse, transport, metrics),
        )
        if scaled is not None:
            metrics.read("orca_rollout_stopped", lambda: () if scaled.stopped is None else [((), scaled.stopped)])
        self._scaler = self._scaler_of(settings, scaled, metrics)
        self._status = StatusPort(
            settings.host,
            settings.status_port,
            self._scheduler.unready,
            pulse.alive,
            self._status_fields,
            metrics,
            pages={
                "/explain": self._explain,
                "/requests": lambda _: Answer(200, {"requests": self._scheduler.requests()}),
            },
            streams={
                "/live": lambda: self._scheduler.live.reader(failures_alone=False),
                "/live/quiet": lambda: self._scheduler.live.reader(failures_alone=True),
            },
            seldom=("/live/quiet",),
            shared=settings.ports_kept,
        )

    def _scaler_of(self, settings: SchedulerSettings, scaled: Scaled | None, metrics: Metrics) -> Scaler | None:
        bounds = settings.bounds
        if scaled is None or bounds is None:
            return None
        return Scaler(self._pool, scaled, self._scheduler, bounds, settings.shape.pods, metrics)

    def _status_fields(self) -> dict[str, Any]:
        """The other fields of the status port's answer."""
        return {
            "engines": self._scheduler.engines(),
            "policy": " and ".join(self._scheduler.policies()) or self._settings.policy,
            "refused": self._scheduler.refused(),
            "notices": list(self._discovery.notices),
            "logits_not_finite": self._scheduler.not_finite,
        }

    def _explain(self, query: Query) -> Answer:
        """The status port's `/explain?request=ID`: why that request took as long as it did. Called in its threads."""
        request = query.get("request")
        if not request:
            return Answer(400, {"error": "request: the id of a request is needed"})
        asked = asyncio.run_coroutine_threadsafe(self._scheduler.explain(request), self._loop)
        try:
            story, standing = asked.result(EXPLAIN_SECONDS)
        except (OrcaError, TimeoutError) as error:
            asked.cancel()
            return Answer(503, {"error": str(error) or f"no answer within {EXPLAIN_SECONDS:g} s"})
        if story is None:
            return Answer(404, {"error": f"request: neither the pool nor this scheduler's engines know {request!r}"})
        return Answer(200, as_json(story, standing))

    def _refusals(self) -> dict[str, str | None]:
        """Why the ranks of each engine that this scheduler masters refuse to form; None: they do not."""
        refused = self._scheduler.refused()
        return {engine: refused.get(engine) for engine in self._scheduler.engines()}

    async def start(self) -> dict[str, str]:
        settings = self._settings
        if settings.run_dir is not None:
            Path(settings.run_dir).mkdir(mode=0o700, parents=True, exist_ok=True)  # of the journals
        return {"status": join_address(settings.host, self._status.port)}

    async def run(self) -> None:
        warning = await reached(self._check_pool)
        if warning is not None:
            log.warning(warning)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._discovery.run(self._scheduler.discovered))
            tasks.create_task(self._scheduler.run())
            if self._scaler is not None:
                tasks.create_task(self._scaler.run())

    async def _check_pool(self) -> str | None:
        """Sentences of which the log should warn. Raises Unavailable while the pool is away, which is logged once."""
        try:
            warning = await self._pool.check_durable(self._settings.allow_volatile_redis)
        except Unavailable as error:
            self._outage.away(error)
            raise
        self._outage.back()
        return warning

    async def drain(self) -> None:
        """Hands the engines over. Without the pool their leases run out by themselves."""
        with contextlib.suppress(TimeoutError, Unavailable):
            async with asyncio.timeout(self._settings.drain_seconds):
                await self._scheduler.leave()

    async def close(self) -> None:
        await self._discovery.close()
        await self._pool.close()
        self._presence.close()
        self._status.close()
        self._telemetry.close()


def discovery_of(
    settings: SchedulerSettings, refused: Callable[[], Mapping[str, str | None]]
) -> tuple[Discovery, Scaled | None]:
    """The discovery that the settings ask for, and whose pods may be scaled.

    Raises FailedPrecondition for settings that cannot be.
    """
    if settings.worker_statefulset is not None:
        # A fixed list of workers does without Kubernetes' client.
        from .discovery.kubernetes import Kubernetes, own_namespace
        from .discovery.statefulset import StatefulSetDiscovery

        kubernetes = Kubernetes(settings.worker_namespace or own_namespace())
        name, shape, scales = settings.worker_statefulset, settings.shape, settings.max_engines is not None
        found = StatefulSetDiscovery(kubernetes, name, shape.pods, settings.worker_port, shape.name, refused, scales)
        return found, found
    assert settings.workers is not None, "the settings have one of the two"
    pods = [pod.strip() for pod in settings.workers.split(",") if pod.strip()]
    return StaticDiscovery(pods, settings.shape.pods), None


def main(settings: SchedulerSettings | None = None) -> None:
    """`python -m orca_scheduler`: settings from flags, environment and file, unless given."""
    settings = settings or SchedulerSettings.load(sys.argv[1:])
    settings.open_log("orca-scheduler")
    try:
        service.run(lambda: service.serve(lambda: SchedulerApp(settings)))
    except OrcaError as error:
        raise SystemExit(f"orca-scheduler: {settings.said(str(error))}") from None
