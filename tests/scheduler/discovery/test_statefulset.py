"""Discovery against an API server that speaks HTTP, and fails as API servers do."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from scheduler.discovery.api_server import ApiServer, Fault, api_server, refuses, says, silence
from scheduler.discovery.manifests import NEW, leaving, pod, statefulset

from orca_common.errors import Unavailable
from orca_common.service import cancel
from orca_scheduler.discovery import following, telling
from orca_scheduler.discovery.candidates import Candidate
from orca_scheduler.discovery.kubernetes import Bounds, Kubernetes
from orca_scheduler.discovery.statefulset import StatefulSetDiscovery

FAULTS = {
    "a refusal": refuses(403, "pods is forbidden"),
    "too many requests": refuses(429),
    "an internal error": refuses(500),
    "a proxy's error": refuses(503),
    "silence": silence,
    "no JSON": says(b"<html>"),
    "another JSON": says(b"[]"),
    "a list of nothing known": says(b'{"items": [{}], "metadata": {}}'),
}


SHAPE = "tp2-pp2-gpus2"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A follower tries again within 0.2 s, not 5."""
    monkeypatch.setattr(following, "FIRST_RETRY", 0.02)
    monkeypatch.setattr(following, "LONGEST_RETRY", 0.2)


class Watched:
    """A discovery at work, and what it has told."""

    def __init__(self, server: ApiServer, kubeconfig: str, bounds: Bounds, scales: bool = False) -> None:
        self.server = server
        kubernetes = Kubernetes("orca", bounds, Path("/nowhere"), kubeconfig)
        self.refused: dict[str, str | None] = {}
        self.discovery = StatefulSetDiscovery(kubernetes, "orca-worker", 2, 50050, SHAPE, lambda: self.refused, scales)
        self.candidates: Sequence[Candidate] | None = None

    def told(self, candidates: Sequence[Candidate]) -> None:
        self.candidates = candidates

    @property
    def addresses(self) -> dict[str, tuple[str, ...]]:
        return {candidate.engine: candidate.pods for candidate in self.candidates or ()}

    @property
    def replacing(self) -> list[str]:
        return [candidate.engine for candidate in self.candidates or () if candidate.replace]


@asynccontextmanager
async def watched(
    folder: Path, faults: dict[str, Fault] | None = None, bounds: Bounds | None = None, *, scales: bool = False
) -> AsyncIterator[Watched]:
    """A discovery over two pods of one engine."""
    async with api_server(folder) as (server, kubeconfig):
        server.put("statefulsets", statefulset(2))
        server.put("pods", pod(0), pod(1))
        server.faults = dict(faults or {})
        world = Watched(server, kubeconfig, bounds or Bounds(), scales)
        running = asyncio.create_task(world.discovery.run(world.told))
        try:
            yield world
        finally:
            await cancel(running)
            await world.discovery.close()


async def until(check: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not check():
            await asyncio.sleep(0.01)


ENGINE_0 = {"engine-0": ("10.0.1.0:50050", "10.0.1.1:50050")}


async def test_pods_come_change_and_go(tmp_path: Path) -> None:
    async with watched(tmp_path) as world:
        assert world.discovery.unready == "StatefulSet orca/orca-worker has not been read yet"
        await until(lambda: world.addresses == ENGINE_0)
        assert world.discovery.unready is None
        world.server.put("pods", leaving(pod(1)))
        await until(lambda: world.addresses == {"engine-0": ("10.0.1.0:50050", "")})
        assert world.candidates is not None
        assert world.candidates[0].absent == "orca-worker-1 is being deleted"
        world.server.remove("pods", "orca-worker-1")
        await until(lambda: world.candidates and world.candidates[0].absent == "orca-worker-1 does not exist yet")
        world.server.put("pods", pod(1, life=2))
        await until(lambda: world.addresses == {"engine-0": ("10.0.1.0:50050", "10.0.2.1:50050")})


async def test_a_second_engine_comes_and_goes_with_the_replicas(tmp_path: Path) -> None:
    async with watched(tmp_path) as world:
        await until(lambda: world.addresses == ENGINE_0)
        world.server.put("statefulsets", statefulset(4))
        await until(lambda: world.addresses == {**ENGINE_0, "engine-1": ("", "")})
        world.server.put("pods", pod(2), pod(3, ready=False))
        await until(lambda: world.addresses == {**ENGINE_0, "engine-1": ("10.0.1.2:50050", "10.0.1.3:50050")})
        world.server.put("statefulsets", statefulset(3))
        await until(lambda: world.addresses == ENGINE_0)


async def test_pods_of_others_are_not_counted(tmp_path: Path) -> None:
    async with watched(tmp_path) as world:
        await until(lambda: world.addresses == ENGINE_0)
        other = pod(1, life=9)
        other["metadata"] |= {"name": "orca-worker-1-debug-1", "uid": "other"}
        stranger = pod(7)
        stranger["metadata"] |= {"ownerReferences": [{"uid": "another set"}]}
        world.server.put("pods", other, stranger, pod(1, life=2))
        await until(lambda: world.addresses == {"engine-0": ("10.0.1.0:50050", "10.0.2.1:50050")})


async def test_the_requests_name_what_they_are_about(tmp_path: Path) -> None:
    async with watched(tmp_path) as world:
        await until(lambda: world.server.asked("watch pods"))
        for request in [*world.server.asked("list statefulsets"), *world.server.asked("watch statefulsets")]:
            assert request.query["fieldSelector"] == "metadata.name=orca-worker"
        for request in [*world.server.asked("list pods"), *world.server.asked("watch pods")]:
            assert request.query["labelSelector"] == "app=orca"
        watch = world.server.asked("watch pods")[0].query
        assert watch["allowWatchBookmarks"] == "true"
        assert watch["timeoutSeconds"] == "30"


async def test_a_watch_that_ends_goes_on_from_where_it_was(tmp_path: Path) -> None:
    async with watched(tmp_path, bounds=Bounds(watch=1)) as world:
        await until(lambda: len(world.server.asked("watch pods")) > 2)
        world.server.put("pods", pod(1, life=2))
        await until(lambda: world.addresses == {"engine-0": ("10.0.1.0:50050", "10.0.2.1:50050")})
        assert len(world.server.asked("list pods")) == 1
        assert world.discovery.notices == ()


async def test_a_broken_connection_is_made_anew(tmp_path: Path) -> None:
    async with watched(tmp_path) as world:
        await until(lambda: world.server.asked("watch pods"))
        world.server.break_watches()
        world.server.put("pods", pod(1, life=2))
        await until(lambda: world.addresses == {"engine-0": ("10.0.1.0:50050", "10.0.2.1:50050")})
        assert len(world.server.asked("list pods")) == 1


async def test_a_version_that_is_too_old_is_listed_anew(tmp_path: Path) -> None:
    async with watched(tmp_path) as world:
        await until(lambda: world.server.asked("watch pods"))
        world.server.faults = {"watch pods": refuses(503)}
        world.server.break_watches()
        await until(lambda: len(world.server.asked("watch pods")) > 1)
        world.server.remove("pods", "orca-worker-1")
        world.server.put("pods", pod(1, life=2))
        world.server.forget()
        world.server.faults = {}
        await until(lambda: world.addresses == {"engine-0": ("10.0.1.0:50050", "10.0.2.1:50050")})
        await until(lambda: world.discovery.notices == ())
        assert len(world.server.asked("list pods")) == 2


async def test_a_list_that_is_answered_410_is_tried_again(tmp_path: Path) -> None:
    async with watched(tmp_path, {"list pods": refuses(410, "the server was restored")}) as world:
        await until(lambda: len(world.server.asked("list pods")) > 1)
        world.server.faults = {}
        await until(lambda: world.addresses == ENGINE_0)


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
@pytest.mark.parametrize("what", ["list pods", "list statefulsets"])
async def test_nothing_is_told_before_it_was_read(tmp_path: Path, fault: Fault, what: str) -> None:
    async with watched(tmp_path, {what: fault}, Bounds(answer=0.2)) as world:
        await until(lambda: len(world.server.asked(what)) > 1)
        await until(lambda: world.discovery.notices)
        assert world.candidates is None
        assert world.discovery.unready == world.discovery.notices[0]
        assert "Kubernetes" in world.discovery.notices[0]
        world.server.faults = {}
        await until(lambda: world.addresses == ENGINE_0)
        await until(lambda: world.discovery.notices == ())
        assert world.discovery.unready is None


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
async def test_what_cannot_be_read_changes_nothing(tmp_path: Path, fault: Fault) -> None:
    async with watched(tmp_path, bounds=Bounds(answer=0.2, watch=1)) as world:
        await until(lambda: world.addresses == ENGINE_0)
        kinds = ("pods", "statefulsets")
        world.server.faults = {f"{verb} {kind}": fault for verb in ("list", "watch") for kind in kinds}
        world.server.break_watches()
        world.server.forget()
        world.server.put("pods", pod(1, life=2))
        asked = len(world.server.asked("watch pods"))
        await until(lambda: len(world.server.asked("watch pods")) > asked + 1 and world.discovery.notices)
        assert world.addresses == ENGINE_0
        assert world.discovery.unready is None
        world.server.faults = {}
        await until(lambda: world.addresses == {"engine-0": ("10.0.1.0:50050", "10.0.2.1:50050")})
        await until(lambda: world.discovery.notices == ())


async def test_one_line_is_logged_for_a_state(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with watched(tmp_path, {"watch pods": refuses(403, "pods is forbidden")}) as world:
        await until(lambda: len(world.server.asked("watch pods")) > 2)
        world.server.faults = {}
        await until(lambda: world.discovery.notices == () and world.addresses == ENGINE_0)
    said = [record for record in caplog.records if record.message == "discovery has trouble"]
    assert [record.__dict__["why"] for record in said] == ["Kubernetes does not watch pods: 403, pods is forbidden"]


async def test_an_expired_token_is_read_again(tmp_path: Path) -> None:
    async with watched(tmp_path) as world:
        world.server.tokens = {"Bearer first"}
        await until(lambda: world.addresses == ENGINE_0)
        world.server.tokens = {"Bearer second"}
        world.server.break_watches()
        await until(lambda: any("401" in notice for notice in world.discovery.notices))
        (tmp_path / "token").write_text("second")
        await until(lambda: world.discovery.notices == ())
        world.server.put("pods", pod(1, life=2))
        await until(lambda: world.addresses == {"engine-0": ("10.0.1.0:50050", "10.0.2.1:50050")})


async def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    async with watched(tmp_path) as world:
        await until(lambda: world.addresses == ENGINE_0)
        nowhere = Kubernetes("orca", Bounds(), Path("/nowhere"), str(tmp_path / "kubeconfig"))
        discovery = StatefulSetDiscovery(nowhere, "orca-worker", 2, 50050)
    running = asyncio.create_task(discovery.run(lambda _: None))  # the server has ended
    try:
        await until(lambda: discovery.notices)
        assert discovery.unready is not None
        assert discovery.unready.startswith("Kubernetes cannot be reached: ")
    finally:
        await cancel(running)
        await discovery.close()


async def test_a_set_that_is_deleted_leaves_its_engines_until_it_comes_back(tmp_path: Path) -> None:
    async with watched(tmp_path) as world:
        await until(lambda: world.addresses == ENGINE_0)
        world.server.remove("statefulsets", "orca-worker")
        gone = ("StatefulSet orca/orca-worker is not there: its engines stay as they are",)
        await until(lambda: world.discovery.notices == gone)
        world.server.remove("pods", "orca-worker-1")
        world.server.put("statefulsets", statefulset(2, uid="another"))
        await until(lambda: world.addresses == {"engine-0": ("", "")})  # nobody has adopted the pod yet
        adopted = pod(0)
        adopted["metadata"]["ownerReferences"][0]["uid"] = "another"
        world.server.put("pods", adopted)
        await until(lambda: world.addresses == {"engine-0": ("10.0.1.0:50050", "")})


async def test_a_set_that_was_never_there(tmp_path: Path) -> None:
    async with api_server(tmp_path) as (server, kubeconfig):
        world = Watched(server, kubeconfig, Bounds())
        running = asyncio.create_task(world.discovery.run(world.told))
        try:
            await until(lambda: "is not there" in (world.discovery.unready or ""))
            server.put("statefulsets", statefulset(2))
            server.put("pods", pod(0), pod(1))
            await until(lambda: world.addresses == ENGINE_0)
        finally:
            await cancel(running)
            await world.discovery.close()


# -- updates


async def test_an_update_replaces_one_engine_after_the_other(tmp_path: Path) -> None:
    async with watched(tmp_path) as world:
        world.server.put("statefulsets", statefulset(4))
        world.server.put("pods", pod(2), pod(3))
        await until(lambda: len(world.addresses) == 2)
        world.server.put("statefulsets", statefulset(4, NEW))
        for first, engine in ((0, "engine-0"), (2, "engine-1")):
            await until(lambda engine=engine: world.replacing == [engine])
            await world.discovery.replace(engine)
            assert world.addresses[engine] == ("", "")  # at once, whatever the watch has told
            assert world.replacing == []
            uids = [request.body["preconditions"]["uid"] for request in world.server.asked("delete pods")]
            assert uids[first:] == [f"uid-{first}-1", f"uid-{first + 1}-1"]
            world.server.put("pods", *(pod(ordinal, NEW, life=2, ready=False) for ordinal in (first, first + 1)))
            await until(lambda engine=engine: "" not in world.addresses[engine])
            assert world.replacing == []
            world.server.put("pods", *(pod(ordinal, NEW, life=2) for ordinal in (first, first + 1)))
        reasons = ["EngineReplaced", "EngineReplaced", "RolloutFinished", "RolloutStarted"]
        await until(lambda: sorted(event["reason"] for event in world.server.objects["events"].values()) == reasons)


async def test_replace_does_nothing_when_a_fresh_look_says_that_it_is_another_ones_turn(tmp_path: Path) -> None:
    async with watched(tmp_path) as world:
        world.server.put("statefulsets", statefulset(4, NEW))
        world.server.put("pods", pod(2), pod(3))
        await until(lambda: world.replacing == ["engine-0"])
        await world.discovery.replace("engine-1")
        world.server.put("pods", pod(0, NEW, life=2), pod(1, NEW, life=2))
        await world.discovery.replace("engine-0")
        assert world.server.asked("delete pods") == []


async def test_replace_deletes_only_the_pod_that_it_means(tmp_path: Path) -> None:
    async with watched(tmp_path) as world:
        world.server.put("statefulsets", statefulset(2, NEW))
        await until(lambda: world.replacing == ["engine-0"])

        async def too_late(request: object) -> None:
            """The controller replaces the pod between the look and the deletion."""
            world.server.faults = {}
            world.server.put("pods", pod(0, NEW, life=2))

        world.server.faults = {"delete pods": too_late}
        await world.discovery.replace("engine-0")
        assert "deletionTimestamp" not in world.server.objects["pods"]["orca-worker-0"]["metadata"]
        assert "deletionTimestamp" in world.server.objects["pods"]["orca-worker-1"]["metadata"]


async def test_an_engine_that_lost_a_pod_before_it_had_finished_is_said(tmp_path: Path) -> None:
    async with watched(tmp_path) as world:
        await until(lambda: world.addresses == ENGINE_0)
        world.discovery.unfinished("engine-0", 280.4)
        await until(lambda: "UnfinishedWaits" in [e["reason"] for e in world.server.objects["events"].values()])
        (event,) = [e for e in world.server.objects["events"].values() if e["reason"] == "UnfinishedWaits"]
        assert (event["type"], event["involvedObject"]["name"]) == ("Warning", "orca-worker")
        assert "engine-0 has lost a pod" in event["message"]
        assert "waits 280 s" in event["message"]


@pytest.mark.parametrize("theirs", [{"labels": {"app": "another"}}, {"ownerReferences": []}], ids=["labels", "owner"])
async def test_replace_leaves_the_pods_of_others(tmp_path: Path, theirs: dict[str, Any]) -> None:
    """The right to delete holds for all pods of a namespace: labels and owner are looked at right before."""
    async with watched(tmp_path) as world:
        world.server.put("statefulsets", statefulset(2, NEW))
        await until(lambda: world.replacing == ["engine-0"])
        other = pod(1)
        other["metadata"] |= theirs
        world.server.put("pods", other)
        await world.discovery.replace("engine-0")
        assert [request.name for request in world.server.asked("delete pods")] == ["orca-worker-0"]


@pytest.mark.parametrize("what", ["list pods", "list statefulsets", "delete pods"])
@pytest.mark.parametrize("fault", [refuses(403), refuses(500), silence], ids=["403", "500", "silence"])
async def test_replace_that_cannot_be_asked_for_is_unavailable(tmp_path: Path, what: str, fault: Fault) -> None:
    async with watched(tmp_path, bounds=Bounds(answer=2 if fault is silence else 10)) as world:
        world.server.put("statefulsets", statefulset(2, NEW))
        await until(lambda: world.replacing == ["engine-0"])
        world.server.faults = {what: fault}
        with pytest.raises(Unavailable, match="Kubernetes"):
            await world.discovery.replace("engine-0")
        assert world.replacing == ["engine-0"]
        world.server.faults = {}
        await world.discovery.replace("engine-0")
        assert world.replacing == []


# -- what Kubernetes is told


def in_engine(world: Watched) -> dict[str, tuple[str, str]]:
    """The condition of each pod."""
    return {
        name: (condition["status"], condition["message"])
        for name, manifest in world.server.objects["pods"].items()
        for condition in manifest["status"]["conditions"]
        if condition["type"] == "orca.serving/InEngine"
    }


SPARE = "orca-worker-2 idles: 3 replicas make 1 engine of 2 pods; scale to 4 for another"
TOLD = {
    "orca-worker-0": ("True", "pod 1 of 2 of engine-0"),
    "orca-worker-1": ("True", "pod 2 of 2 of engine-0"),
    "orca-worker-2": ("False", SPARE),
}


async def test_spare_pods_are_told_why_they_idle(tmp_path: Path) -> None:
    async with watched(tmp_path) as world:
        world.server.put("statefulsets", statefulset(3))
        world.server.put("pods", pod(2, ready=False))
        await until(lambda: in_engine(world) == TOLD and world.server.objects["events"])
        [event] = world.server.objects["events"].values()
        assert event["involvedObject"]["uid"] == "uid-2-1"
        assert (event["reason"], event["type"], event["message"]) == ("SparePod", "Warning", SPARE)
        assert world.discovery.notices == (SPARE,)
        world.server.put("statefulsets", statefulset(4))
        await until(lambda: in_engine(world)["orca-worker-2"] == ("True", "pod 1 of 2 of engine-1"))


async def test_an_event_is_said_again_before_kubernetes_forgets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as it is so: an Event expires after an hour."""
    assert telling.SAY_AGAIN < telling.REFRESH < 3600 / 2, "the second try comes in time, too"
    monkeypatch.setattr(telling, "SAY_AGAIN", 0.1)
    monkeypatch.setattr(telling, "REFRESH", 0.5)
    async with watched(tmp_path) as world:
        world.server.put("statefulsets", statefulset(3))
        world.server.put("pods", pod(2, ready=False))
        await until(lambda: len(world.server.asked("patch events")) >= 2)
        assert len(world.server.objects["events"]) == 1
        assert in_engine(world) == TOLD


async def test_several_schedulers_say_it_once(tmp_path: Path) -> None:
    async with watched(tmp_path) as world:
        world.server.put("statefulsets", statefulset(3))
        world.server.put("pods", pod(2, ready=False))
        await until(lambda: in_engine(world) == TOLD and world.server.objects["events"])
        patches = len(world.server.asked("patch pods/status"))
        await until(lambda: rollout_of(world))
        assert len(world.server.asked("patch statefulsets/status")) == 1
        other = Watched(world.server, str(tmp_path / "kubeconfig"), Bounds())
        running = asyncio.create_task(other.discovery.run(other.told))
        try:
            await until(lambda: len(world.server.asked("create events")) == 2)
            await until(lambda: len(world.server.asked("patch events")) == 1)
        finally:
            await cancel(running)
            await other.discovery.close()
        assert len(world.server.objects["events"]) == 1
        assert len(world.server.asked("patch pods/status")) == patches
        assert len(world.server.asked("patch statefulsets/status")) == 1


async def test_who_may_not_tell_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writes = ("create events", "patch pods/status", "patch statefulsets/status")
    mute = {what: refuses(403, "forbidden") for what in writes}
    async with watched(tmp_path, mute) as world:
        world.server.put("statefulsets", statefulset(3))
        world.server.put("pods", pod(2, ready=False))
        await until(lambda: world.server.asked("create events"))
        world.server.put("pods", pod(1, life=2))
        await until(lambda: world.addresses == {"engine-0": ("10.0.1.0:50050", "10.0.2.1:50050")})
        await until(lambda: len(world.server.asked("patch pods/status")) > 3)
    assert [record.message for record in caplog.records].count("Kubernetes was not told") == 1


def rollout_of(world: Watched) -> dict[str, str]:
    """The annotations of the StatefulSet that say how its revision stands."""
    annotations = world.server.objects["statefulsets"]["orca-worker"]["metadata"].get("annotations", {})
    return {key.removeprefix("orca.serving/"): value for key, value in annotations.items()}


async def test_the_statefulset_says_how_its_revision_stands(tmp_path: Path) -> None:
    async with watched(tmp_path) as world:
        await until(lambda: rollout_of(world))
        finished = {"rollout": "Finished", "rollout-generation": "1"}
        assert rollout_of(world) == finished | {"rollout-message": "orca-worker-old: 1 of 1 engines ready"}
        patch = world.server.asked("patch statefulsets/status")[0].body
        assert patch["metadata"]["uid"] == "uid-of-the-set"
        world.server.put("statefulsets", statefulset(2, NEW))
        await until(lambda: rollout_of(world).get("rollout") == "Progressing")
        image = {"reason": "ErrImagePull", "message": "not found"}
        container = {"name": "worker", "ready": False, "state": {"waiting": image}}
        world.server.put("pods", pod(0, NEW, life=2), pod(1, NEW, ready=False, life=2, containerStatuses=[container]))
        await until(lambda: rollout_of(world)["rollout"] == "Stopped")
        assert world.discovery.stopped is True
        assert rollout_of(world)["rollout-message"] == (
            "engine-0 of orca-worker-new is not up: "
            "orca-worker-1 cannot start: its container worker waits: ErrImagePull: not found"
        )


async def test_ranks_that_refuse_to_form_stop_a_revision_until_they_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The master puts the reason on the pods, where every scheduler and `orca wait` read it."""
    monkeypatch.setattr(telling, "SAY_AGAIN", 0.5)
    why = "tp 3: 4 heads cannot be shared evenly by 3 tensor ranks"
    async with watched(tmp_path) as world:
        await until(lambda: rollout_of(world).get("rollout") == "Finished")
        world.refused = {"engine-0": why, "engine-1": None}
        world.server.put("pods", pod(0, ready=False), pod(1, ready=False))
        await until(lambda: rollout_of(world)["rollout"] == "Stopped")
        assert world.discovery.stopped is True
        assert rollout_of(world)["rollout-message"] == (
            f"engine-0 of orca-worker-old is not up: orca-worker-0 cannot form: {why}; orca-worker-1 too"
        )
        world.refused = {"engine-0": None}
        await until(lambda: rollout_of(world)["rollout"] == "Progressing")
        assert world.discovery.stopped is False


async def test_a_scheduler_of_another_shape_judges_nothing(tmp_path: Path) -> None:
    """While tp or pp change, schedulers of both settings run. The older ones would refuse pods of the new revision."""
    async with watched(tmp_path) as world:
        await until(lambda: rollout_of(world).get("rollout") == "Finished")
        changed = statefulset(2, NEW)
        changed["metadata"]["annotations"] = {"orca.serving/shape": "tp4-pp2-gpus4"}
        world.server.put("statefulsets", changed)
        await until(lambda: world.replacing == ["engine-0"])
        world.refused = {"engine-0": "gpus_per_pod: the pod has 4 ranks, not 2"}
        changed["metadata"]["annotations"] = {"orca.serving/shape": SHAPE}
        await world.discovery.replace("engine-0")
        assert rollout_of(world) == {"shape": "tp4-pp2-gpus4"}
        world.server.put("statefulsets", changed)  # rolled back
        await until(lambda: rollout_of(world).get("rollout") == "Progressing")
