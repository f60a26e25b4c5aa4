"""How the processes of a stack are scheduled beside the kernels."""

import os
from pathlib import Path

import pytest

from orca_local.child import Child

LISTENS = """echo '{"status": "127.0.0.1:1"}'; exec sleep 60"""


@pytest.mark.parametrize(("batch", "policy"), [(True, os.SCHED_BATCH), (False, os.SCHED_OTHER)])
async def test_a_batch_process_takes_no_core_from_others(tmp_path: Path, batch: bool, policy: int) -> None:
    child = Child("endpoint", "endpoint-0", ["sh", "-c", LISTENS], {}, tmp_path / "log", batch=batch)
    await child.start()
    try:
        assert child.pid is not None
        assert os.sched_getscheduler(child.pid) == policy
    finally:
        await child.end(5)
