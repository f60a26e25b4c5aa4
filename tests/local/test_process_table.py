"""What a run's `processes.json` tells, and what `orca status` makes of it."""

import json
import os
from pathlib import Path

from orca_cli.runs import state_of
from orca_local.child import Child
from orca_local.process_table import ProcessTable
from orca_local.settings import ServeSettings


def test_a_run_that_has_just_begun_is_not_ready(tmp_path: Path) -> None:
    """Only Redis listens, which has no status port: `orca status` ended with 0."""

    class Running(Child):
        @property
        def pid(self) -> int:
            return os.getpid()

    redis, endpoint = (Running(role, f"{role}-0", [], {}, tmp_path / "log") for role in ("redis", "endpoint"))
    redis.addresses = {"address": "127.0.0.1:1"}
    ProcessTable(tmp_path / "processes.json", ServeSettings.load(model="m"), [redis, endpoint], print).write()
    rows = json.loads((tmp_path / "processes.json").read_text())
    assert [(row["name"], row["address"]) for row in rows] == [("redis-0", "127.0.0.1:1"), ("endpoint-0", None)]
    table, ready = state_of(tmp_path)
    assert list(table.columns[-1].cells) == ["yes", "starts"]
    assert not ready
