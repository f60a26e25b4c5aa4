"""The scheduler as a service."""

import asyncio
import logging

import pytest
from logged import messages_of
from servers import redis_server

from orca_common import service
from orca_scheduler.app import SchedulerApp
from orca_scheduler.settings import SchedulerSettings


async def test_a_pool_that_was_never_reached_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """It asked again and again, without a word, and a wrong password was not found. The log has the end, too."""
    outage = "orca_pool.outage"
    caplog.set_level(logging.INFO, outage)
    with redis_server() as redis:
        redis.kill()
        app = SchedulerApp(SchedulerSettings(workers="127.0.0.1:1", redis_url=redis.url))
        running = asyncio.create_task(app.run())
        try:
            async with asyncio.timeout(60):
                while not messages_of(caplog, outage):
                    await asyncio.sleep(0.02)
                redis.restart()
                while len(messages_of(caplog, outage)) < 2:
                    await asyncio.sleep(0.02)
        finally:
            await service.cancel(running)
            await app.close()
    assert messages_of(caplog, outage) == ["the request pool is away", "the request pool is back"]
