"""Faults under load: no stream ends with an error, every token is the right one, and the pause is written down."""

import faults
import pytest
from faults import Fault
from pauses import Pauses
from traffic import Under

from release import Release

FAULTS = [
    pytest.param(faults.worker_killed, "a worker pod deleted, grace 0", marks=pytest.mark.ci),
    pytest.param(faults.worker_deleted, "a worker pod deleted, with grace"),
    pytest.param(
        faults.scheduler_killed, "the scheduler that masters the engine deleted, grace 0", marks=pytest.mark.ci
    ),
    pytest.param(faults.scheduler_deleted, "the scheduler that masters the engine deleted, with grace"),
    pytest.param(faults.endpoints_killed, "each endpoint deleted, grace 0", marks=pytest.mark.ci),
    pytest.param(faults.endpoints_deleted, "each endpoint deleted, with grace"),
    pytest.param(faults.redis_killed, "Redis deleted, grace 0"),
    pytest.param(faults.redis_and_worker_killed, "Redis and a worker pod deleted at once, grace 0"),
    pytest.param(faults.all_restarted, "endpoints, schedulers, workers and Redis restarted at once"),
    pytest.param(faults.rank_killed, "a rank killed in its container"),
    pytest.param(faults.fork_server_killed, "a fork server killed in its container, then a rank"),
    pytest.param(faults.first_process_killed, "process 1 of a worker's container killed"),
]


@pytest.mark.parametrize(("fault", "name"), FAULTS)
async def test_no_stream_notices_more_than_a_pause(
    orca: Release, traffic: Under, pauses: Pauses, fault: Fault, name: str
) -> None:
    async with traffic(orca) as load:
        async with load.disturbed(name) as seen:
            await fault(orca)
            await orca.healed()
        pauses(seen)
    assert load.finished >= 20
