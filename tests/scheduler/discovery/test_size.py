"""How many engines there are to be, and which of them begin requests, as the StatefulSet says it."""

from pathlib import Path

import pytest
from scheduler.discovery.api_server import refuses
from scheduler.discovery.manifests import pod, statefulset
from scheduler.discovery.test_statefulset import ENGINE_0, Watched, until, watched

from orca_scheduler.discovery.kubernetes import Trouble
from orca_scheduler.discovery.pods import WorkerSet, worker_set
from orca_scheduler.discovery.size import Size, marks, size_of


def workers(replicas: int, generation: int = 1, annotations: dict[str, str] | None = None) -> WorkerSet:
    manifest = statefulset(replicas)
    manifest["metadata"] |= {"generation": generation, "annotations": annotations or {}}
    return worker_set(manifest)


@pytest.mark.parametrize(("replicas", "engines"), [(0, 0), (1, 0), (2, 1), (5, 2)])
def test_all_engines_begin_requests_unless_it_is_written(replicas: int, engines: int) -> None:
    assert size_of(workers(replicas), 2) == Size(replicas, engines, engines, 1)


def test_what_is_written_counts_for_this_specification_alone() -> None:
    written = dict(marks(Size(6, 3, 3, generation=3), 1))
    assert size_of(workers(6, 3, written), 2) == Size(6, 3, 1, 3)
    assert size_of(workers(6, 4, written), 2) == Size(6, 3, 3, 4)  # an update, or replicas that were changed and back
    nonsense = {**written, "orca.serving/engines-beginning": "nonsense"}
    assert size_of(workers(6, 3, nonsense), 2) == Size(6, 3, 3, 3)
    assert size_of(workers(6, 3, dict(marks(Size(6, 3, 3, 3), 9))), 2) == Size(6, 3, 3, 3)


def ending(world: Watched) -> list[str]:
    return [candidate.engine for candidate in world.candidates or () if candidate.ending]


async def resize(world: Watched, engines: int, beginning: int, why: str) -> None:
    """Decided by what is seen now."""
    size = world.discovery.size
    assert size is not None
    await world.discovery.resize(size, engines, beginning, why)


async def test_engines_come_finish_and_go(tmp_path: Path) -> None:
    async with watched(tmp_path, scales=True) as world:
        await until(lambda: world.addresses == ENGINE_0)
        assert world.discovery.size == Size(2, 1, 1, 1)
        await resize(world, 2, 2, "the queue is old")
        await until(lambda: world.discovery.size == Size(4, 2, 2, 2))
        world.server.put("pods", pod(2), pod(3))
        await resize(world, 2, 1, "there is room")
        await until(lambda: world.discovery.size == Size(4, 2, 1, 2) and ending(world) == ["engine-1"])
        await resize(world, 2, 2, "the queue is old")
        await until(lambda: world.discovery.size == Size(4, 2, 2, 2) and not ending(world))
        await resize(world, 2, 1, "there is room")
        await until(lambda: ending(world) == ["engine-1"])
        await resize(world, 1, 1, "there is room")
        await until(lambda: world.discovery.size == Size(2, 1, 1, 3) and world.addresses == ENGINE_0)
        events = world.server.objects["events"]
        await until(lambda: sum(event["reason"] == "ScaledByLoad" for event in events.values()) == 2)
        assert {event["message"] for event in events.values() if event["reason"] == "ScaledByLoad"} == {
            "scaled from 2 to 4 pods: the queue is old",
            "scaled from 4 to 2 pods: there is room",
        }


async def test_a_number_that_was_changed_meanwhile_stays(tmp_path: Path) -> None:
    """Somebody scales while a scheduler decides by what it saw before, whether it sees that in time or not."""
    async with watched(tmp_path, scales=True) as world:
        await until(lambda: world.addresses == ENGINE_0)
        seen = world.discovery.size
        assert seen is not None
        world.server.put("statefulsets", statefulset(6))
        await world.discovery.resize(seen, 2, 2, "the queue is old")
        await until(lambda: world.discovery.size == Size(6, 3, 3, 1))
        await world.discovery.resize(seen, 2, 2, "the queue is old")
        assert world.server.objects["statefulsets"]["orca-worker"]["spec"]["replicas"] == 6
        assert len(world.server.asked("patch statefulsets/scale")) == 2


async def test_a_refusal_is_trouble(tmp_path: Path) -> None:
    async with watched(tmp_path, {"patch statefulsets/scale": refuses(403, "is forbidden")}, scales=True) as world:
        await until(lambda: world.addresses == ENGINE_0)
        with pytest.raises(Trouble, match="does not scale the StatefulSet orca-worker: 403, is forbidden"):
            await resize(world, 2, 2, "the queue is old")


async def test_schedulers_that_do_not_scale_ignore_what_is_written(tmp_path: Path) -> None:
    """Scaling was switched off while an engine finished."""
    async with watched(tmp_path) as world:
        await until(lambda: world.addresses == ENGINE_0)
        left = statefulset(4)
        left["metadata"]["annotations"] = dict(marks(Size(4, 2, 2, 1), 1))
        world.server.put("statefulsets", left)
        await until(lambda: world.discovery.size == Size(4, 2, 1, 1))
        assert not ending(world)
