"""What a run's `processes.json` tells, and what `orca status` makes of it."""

import json
import os
import signal
from pathlib import Path

from orca.v1 import worker_pb2 as pb
from orca_cli import looking
from orca_cli.runs import state_of
from orca_local.child import Child, RedisChild
from orca_local.process_table import ProcessTable
from orca_local.run_folder import RunFolder
from orca_local.settings import ServeSettings


def test_a_run_that_has_just_begun_is_not_ready(tmp_path: Path) -> None:
    """Only Redis has an address, and no status port: `orca status` ended with 0."""

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
    assert list(table.columns[-1].cells) == ["does not answer", "starts"]
    assert not ready


def test_ranks_are_numbered_in_their_engine(tmp_path: Path) -> None:
    settings = ServeSettings.load(model="m", tp=2, pp=3, engines=2)
    table = ProcessTable(tmp_path / "processes.json", settings, [], print)
    table.ranks = {pod: [pb.RankEntry(local_rank=n, address="a", pid=1) for n in range(2)] for pod in range(6)}
    table.write()
    rows = json.loads((tmp_path / "processes.json").read_text())
    found = [(row["engine"], row["stage"], row["tensor_rank"], row["rank"], row["supervisor"]) for row in rows]
    assert found == [
        (f"engine-{pod // 3}", pod % 3, n, pod % 3 * 2 + n, f"supervisor-{pod}") for pod in range(6) for n in range(2)
    ]


async def test_a_frozen_redis_is_named(tmp_path: Path) -> None:
    """It was called well, and the services that wait for it were blamed."""
    with RunFolder(tmp_path) as folder:
        redis = RedisChild(tmp_path / "redis", folder.log("redis"), folder.descriptor, batch=False)
        await redis.start()
        assert redis.pid is not None
        row = {"role": "redis", "name": "redis", "status": None, "pid": redis.pid}
        (tmp_path / "processes.json").write_text(json.dumps([row | {"address": redis.address}]))
        try:
            table, ready = state_of(tmp_path)
            assert (list(table.columns[-1].cells), ready) == (["yes"], True)
            os.kill(redis.pid, signal.SIGSTOP)
            table, ready = state_of(tmp_path)
            assert (list(table.columns[-1].cells), ready) == (["does not answer"], False)
        finally:
            redis.kill()
            await redis.ended()
    table, _ = state_of(tmp_path)
    assert list(table.columns[-1].cells) == ["has ended"]


def test_the_load_without_a_status_port(tmp_path: Path) -> None:
    """A run that begins or breaks: no number is made up."""
    row = {"role": "scheduler", "name": "scheduler-0", "status": None, "pid": os.getpid()}
    (tmp_path / "processes.json").write_text(json.dumps([row]))
    assert looking.load(tmp_path) == "not known yet"
    (tmp_path / "processes.json").write_text(json.dumps([row | {"status": "127.0.0.1:1"}]))
    refused = "not known: no answer from 127.0.0.1:1: its status port does not answer (Connection refused)"
    assert looking.load(tmp_path) == refused
