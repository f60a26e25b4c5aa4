"""A sample of the kill matrix: each role at one moment. `make matrix ROUNDS=20` runs all of it."""

from pathlib import Path

import pytest
from e2e.kill_matrix import matrix
from e2e.kill_table import Moment

SAMPLE = {
    "redis": Moment.INITIATION,
    "rank": Moment.INCREMENT,
    "scheduler": Moment.QUEUED,
    "endpoint": Moment.LAST_TOKEN,
    "supervisor": Moment.AFTER_FINISH,
}


@pytest.mark.timeout(280)
async def test_no_token_is_lost_and_nothing_is_left(tmp_path: Path) -> None:
    async with matrix(tmp_path, seed=3, tp=1, pp=2) as lab:
        for role, moment in SAMPLE.items():
            victim = [victim for victim in lab.victims if victim.role == role][-1]
            kill = await lab.cell(victim, moment)
            print(f"{kill.name} killed, {moment}: pause {kill.pause:.1f} s")
