"""A stack under chaos: who can be hit, how its processes are, and what its journals have left."""

import asyncio
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from scheduler.life_script import fresh_lifecycle
from scheduler.world import Asked, World

from orca_chaos import rounds
from orca_chaos.client import Violation
from orca_chaos.faults import OF_LINKS, OF_PROCESSES, Fault, Kind, Victim
from orca_chaos.local_target import LocalTarget, reserved, victims_of
from orca_chaos.network import listening
from orca_chaos.rounds import first_of, healed, nothing_left
from orca_local.embedded_pool import keep_port
from orca_local.settings import ServeSettings
from orca_scheduler.master.journal import Journal, path_of


def settings_of(**given: Any) -> Any:
    return ServeSettings.load(port=0, http_port=0, endpoints=1, schedulers=1, **given)


def test_who_can_be_hit() -> None:
    """All processes of a stack, and each way between two of them that has a proxy."""
    processes = [
        *(("endpoint", "endpoint-0"), ("scheduler", "scheduler-0")),
        *(("supervisor", "supervisor-0"), ("supervisor", "supervisor-1")),
        *(("rank", f"rank-{pod}.{rank}") for pod in range(2) for rank in range(2)),
        ("redis", "redis"),
        *(("fork server", f"fork-server-{of}") for of in ("pods", 0, 1)),
    ]
    ways = [
        ("endpoint > redis", "endpoint-0 > redis"),
        ("scheduler > redis", "scheduler-0 > redis"),
        *(("scheduler > supervisor", f"scheduler > supervisor-{pod}") for pod in range(2)),
        *(("scheduler > rank", f"scheduler > rank-{pod}.{rank}") for pod in range(2) for rank in range(2)),
        *(("rank > rank", f"rank > rank-{pod}.{rank}") for pod in range(2) for rank in range(2)),
        ("all > redis", "all > redis"),
    ]
    settings = settings_of(engines=1, pp=2, tp=2)
    wanted = [Victim(*names, OF_PROCESSES) for names in processes]
    assert victims_of(settings, links=False) == wanted
    assert victims_of(settings) == [*wanted, *(Victim(*names, OF_LINKS) for names in ways)]
    assert [one.name for one in wanted if one not in victims_of(settings, redis=False)] == ["redis"]
    alone = victims_of(settings_of(engines=1, pp=1, tp=1))
    assert "rank > rank" not in {one.role for one in alone}, "a single rank speaks to no other"


class Child:
    """A process of a stack as it tells itself."""

    def __init__(self, role: str, name: str, pid: int | None, **engines: str | None) -> None:
        self.role, self.name, self.pid = role, name, pid
        self.why: str | None = None
        self._engines = {name.replace("_", "-"): why for name, why in engines.items()}

    def unready(self) -> str | None:
        return self.why

    def engines(self) -> dict[str, str | None]:
        return self._engines

    def fork_server(self) -> int:
        return 70


def target_of(tmp_path: Path, *children: Child) -> LocalTarget:
    stack: Any = SimpleNamespace(
        children=list(children), fork_server=71, grpc_addresses=["a:1"], http_addresses=["b:1"], rank_pid=rank_pid
    )
    return LocalTarget(stack, settings_of(engines=2, pp=2, pool="mine", redis_url="redis://c:1/0"), tmp_path, None)


def rank_pid(pod: int, local: int) -> int:
    return 100 * pod + local


def test_what_a_target_knows_of_its_stack(tmp_path: Path) -> None:
    children = [
        Child("endpoint", "endpoint-0", 5),
        Child("scheduler", "scheduler-0", 6, engine_0=None),
        Child("scheduler", "scheduler-1", 7, engine_1="a rank is missing"),
        Child("supervisor", "supervisor-1", 8),
        Child("supervisor", "supervisor-2", None),
    ]
    target = target_of(tmp_path, *children)
    assert (target.addresses, target.http_addresses) == (("a:1",), ("b:1",))
    assert (target.engines, target.endpoints, target.tp, target.pp) == (2, 1, 1, 2)
    assert (target.pool, target.redis_url) == ("mine", "redis://c:1/0")
    assert {one.role for one in target.victims()} == {
        *("endpoint", "scheduler", "supervisor", "rank", "fork server"),
    }, "neither the user's own Redis, nor ways without a proxy"
    names = (
        "fork-server-pods",
        "fork-server-1",
        "fork-server-2",
        "rank-3.1",
        "scheduler-1",
        "supervisor-2",
        "stranger",
    )
    assert [target.pid(name) for name in names] == [71, 70, None, 301, 7, None, None]
    assert [target.master(f"engine-{n}") for n in range(3)] == ["scheduler-0", "scheduler-1", ""]
    assert [target.serves(f"engine-{n}") for n in range(3)] == [True, False, False]
    assert target.ready("scheduler") == ["scheduler-0", "scheduler-1"]
    assert target.ready("supervisor") == ["supervisor-1"]


async def test_why_a_stack_is_not_well(tmp_path: Path) -> None:
    endpoint, redis = Child("endpoint", "endpoint-0", 5), Child("redis", "redis", 9)
    first, second = Child("scheduler", "scheduler-0", 6, engine_0=None), Child("scheduler", "scheduler-1", 7)
    target = target_of(tmp_path, redis, endpoint, first, second)
    assert (await target.ailing() or "").endswith(" drives engine-1")
    second._engines["engine-1"] = "a rank is missing"
    assert await target.ailing() == "a rank is missing"
    second._engines["engine-1"] = None
    assert await target.ailing() is None
    redis.why = "that has no status port"
    assert await target.ailing() is None
    second._engines["engine-0"] = None
    assert await target.ailing() == "two schedulers believe that they drive engine-0"
    del second._engines["engine-0"]
    endpoint.why = "it starts"
    assert await target.ailing() == "endpoint-0: it starts"
    endpoint.pid = None
    assert await target.ailing() == "endpoint-0 does not run"


@contextmanager
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as started:
        try:
            yield started
        finally:
            started.kill()


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


async def test_processes_are_frozen_and_killed(tmp_path: Path) -> None:
    """One that was killed is missed until another one has its name; one that does not run cannot be hit."""
    with process() as running:
        child = Child("scheduler", "scheduler-0", running.pid, engine_0=None, engine_1=None)
        target = target_of(tmp_path, child)
        victim = Victim("scheduler", "scheduler-0", OF_PROCESSES)
        stop, kill = Fault(0.0, Kind.STOP, victim, 1.0), Fault(0.0, Kind.KILL, victim)
        assert await target.begin(stop)
        while state_of(running.pid) != "T":
            await asyncio.sleep(0)
        assert await target.ailing() is None
        await target.end(stop)
        while state_of(running.pid) == "T":
            await asyncio.sleep(0)
        assert await target.begin(kill)
        assert await asyncio.to_thread(running.wait) == -9
    await target.end(kill)
    assert await target.ailing() == "scheduler-0: not started again yet"
    assert await target.begin(kill), "its process has ended meanwhile"
    child.pid = None
    assert await target.ailing() == "scheduler-0: not started again yet"
    assert not await target.begin(stop)
    child.pid = os.getpid()
    assert await target.ailing() is None


def journal(folder: Path, world: World, term: int, wrong: bool = False) -> None:
    """A journal of a world's events. wrong: the last one has led to nothing."""
    core, life = world.fresh(), fresh_lifecycle()
    written = Journal(path_of(folder, "engine-0", term), core, life, term)
    for event, _ in world.record:
        actions = core.step(event)
        written.core_step(event, () if wrong and event is world.record[-1][0] else actions)
    written.close()


def test_what_journals_have_left(tmp_path: Path) -> None:
    """The newest one of each engine counts."""
    world = World(2, 1, 4)
    world.form(64)
    world.arrive(Asked(3, 2), Asked(2, 1))
    journal(tmp_path, world, 1)
    assert reserved(tmp_path) == ["journal-engine-0-1.jsonl: 12 slots are reserved at the end"]
    journal(tmp_path, world, 2, wrong=True)
    other, left = reserved(tmp_path)
    assert other.startswith("journal-engine-0-2.jsonl: Arrived(")
    assert other.endswith(" replays to other actions")
    assert left == "journal-engine-0-2.jsonl: 12 slots are reserved at the end"
    world.back(5, 6)
    world.back(7)
    journal(tmp_path, world, 3)
    assert reserved(tmp_path) == []


def test_who_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, keep_port() as kept:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            found = listening()
            assert port in found
            assert client.getsockname()[1] not in found, "a connection's own end"
        assert kept.getsockname()[1] not in found, "it is only kept"


async def test_what_is_not_well_again_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    troubles = ["engine-0: it forms", None]

    async def ailing() -> str | None:
        return troubles.pop(0) if troubles else "engine-0 is away"

    target = cast(Any, SimpleNamespace(ailing=ailing))
    monkeypatch.setattr(rounds, "HEALED", 60.0)
    await healed(target)
    assert troubles == []
    monkeypatch.setattr(rounds, "HEALED", 0.01)
    with pytest.raises(Violation, match=r"^not all is well 0 s after the faults: engine-0 is away$"):
        await healed(target)


async def test_what_is_left_at_the_end() -> None:
    left = list[str]()

    async def leftovers() -> list[str]:
        return left

    target = cast(Any, SimpleNamespace(redis_url=None, leftovers=leftovers))
    await nothing_left(target)
    left += [f"part {n}" for n in range(12)]
    with pytest.raises(Violation, match=r"^at the end: part 0; .*; part 9$"):
        await nothing_left(target)


def test_the_first_violation_of_several_errors() -> None:
    wrong = Violation("wrong")
    group = BaseExceptionGroup("a", [ValueError(), BaseExceptionGroup("b", [KeyError(), wrong]), Violation("later")])
    assert [first_of(error) for error in (wrong, group, ValueError())] == [wrong, wrong, None]


async def test_a_fault_begins_lasts_and_is_healed() -> None:
    """Also where it found nothing to hit, or where what begins it fails."""
    done = list[str]()
    fault = Fault(0.0, Kind.STOP, Victim("rank", "rank-0.0", OF_PROCESSES))

    async def begin(_: Fault) -> bool:
        done.append("begun")
        return False

    async def end(_: Fault) -> None:
        done.append("ended")

    load: Any = SimpleNamespace(faults=1)
    assert not await rounds._one(cast(Any, SimpleNamespace(begin=begin, end=end)), load, fault)
    assert (done, load.faults) == (["begun", "ended"], 2)
