"""The scheduler service: `python -m orca_scheduler`, settings from `ORCA_*`."""

import asyncio
import contextlib
import json
import secrets
import socket

from orca_common import logs
from orca_common.errors import Unavailable
from orca_common.service import LoopPulse, StatusPort, cancel, run, stop_event, until
from orca_common.telemetry import Telemetry
from orca_pool.pool import Pool

from .discovery import candidates
from .scheduler import Scheduler
from .settings import SchedulerSettings


async def serve(settings: SchedulerSettings) -> None:
    """Runs until SIGTERM, then hands its engines over."""
    name = f"{socket.gethostname()}-{secrets.token_hex(4)}"
    telemetry, pulse, stop = Telemetry("orca-scheduler", name), LoopPulse(), stop_event()
    pods = [pod.strip() for pod in settings.workers.split(",") if pod.strip()]
    engines = candidates(pods, settings.pods_per_engine)
    async with Pool(settings.redis_url, settings.pool) as pool:
        scheduler = Scheduler(name, engines, pool, settings, telemetry, pulse)
        status = StatusPort(settings.host, settings.status_port, scheduler.unready, pulse.alive)
        print(json.dumps({"status": f"{settings.host}:{status.port}"}), flush=True)
        looking = asyncio.create_task(scheduler.run(), name="scheduler")
        try:
            await until(stop, looking)
        finally:
            await cancel(looking)
            with contextlib.suppress(TimeoutError, Unavailable):  # then the leases run out by themselves
                await asyncio.wait_for(scheduler.leave(), settings.drain_seconds)
            status.close()
            telemetry.close()


def main(settings: SchedulerSettings | None = None) -> None:
    """`python -m orca_scheduler`: settings from the environment, unless given."""
    settings = settings or SchedulerSettings.load()
    logs.configure("scheduler", settings.log_level)
    run(lambda: serve(settings))


if __name__ == "__main__":
    main()
