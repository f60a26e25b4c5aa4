"""The scheduler as a service."""

import asyncio
import logging

import pytest

from orca_common import service
from orca_scheduler.app import SchedulerApp
from orca_scheduler.settings import SchedulerSettings


async def test_a_pool_that_was_never_reached_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """It asked again and again, without a word: a wrong password was found by nobody."""
    caplog.set_level(logging.WARNING, "orca_pool.outage")
    app = SchedulerApp(SchedulerSettings(workers="127.0.0.1:1", redis_url="redis://127.0.0.1:1/0"))
    running = asyncio.create_task(app.run())
    try:
        async with asyncio.timeout(20):
            while not caplog.messages:
                await asyncio.sleep(0.02)
    finally:
        await service.cancel(running)
        await app.close()
    assert caplog.messages == ["the request pool is away"]
