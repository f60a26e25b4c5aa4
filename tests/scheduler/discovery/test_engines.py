"""What discovery reads from manifests, and which pods make which engine."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler.discovery.manifests import SET_UID, leaving, pod, statefulset

from orca_scheduler.discovery.candidates import Candidate
from orca_scheduler.discovery.engines import engines, spares, why_spare
from orca_scheduler.discovery.pods import Condition, WorkerPod, worker_pod, worker_set

WORKERS = worker_set(statefulset(2))


def read(manifest: dict[str, Any]) -> WorkerPod:
    found = worker_pod(manifest, WORKERS)
    assert found is not None
    return found


def waits(reason: str, message: str = "", **last: Any) -> dict[str, Any]:
    return {"name": "worker", "ready": False, "state": {"waiting": {"reason": reason, "message": message}}, **last}


def ended(log: str) -> dict[str, Any]:
    """A container whose message is the end of its log."""
    return waits("CrashLoopBackOff", lastState={"terminated": {"exitCode": 1, "reason": "Error", "message": log}})


JSON = '{"time": "T", "event": "started"}\n{"time": "T", "event": "stopped", "why": "no GPU"}\n'  # lines of a log
OOM = {"lastState": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}
STARTS = {"name": "worker", "ready": False, "state": {"waiting": {"reason": "PodInitializing"}}}
NO_NODE = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/1 nodes are available: 1 Insufficient nvidia.com/gpu.",
}
TROUBLES: list[tuple[dict[str, Any], str, bool]] = [
    (
        {"phase": "Pending", "podIP": "", "conditions": [NO_NODE]},
        "is not scheduled: 0/1 nodes are available: 1 Insufficient nvidia.com/gpu.",
        True,
    ),
    (
        {"containerStatuses": [waits("ImagePullBackOff", "no such\n image")]},
        "cannot start: its container worker waits: ImagePullBackOff: no such image",
        True,
    ),
    (
        {"containerStatuses": [waits("CrashLoopBackOff", "back-off 10s", **OOM)]},
        "cannot start: its container worker ended with 137: OOMKilled",
        True,
    ),
    (
        {"containerStatuses": [{"name": "worker", "ready": False, "state": {"running": {}}, **OOM}]},
        "cannot start: its container worker ended with 137: OOMKilled",
        True,
    ),
    (
        {"initContainerStatuses": [{"name": "fetch", "state": {"running": {}}}], "containerStatuses": [STARTS]},
        "waits for its init container fetch to end",
        False,
    ),
    (
        {
            "initContainerStatuses": [
                {"name": "fetch", "state": {"terminated": {"exitCode": 1, "reason": "Error", "message": "no disk"}}}
            ],
            "containerStatuses": [STARTS],
        },
        "cannot start: its init container fetch ended with 1: Error: no disk",
        True,
    ),
    (
        {"containerStatuses": [ended(f"{JSON}orca-supervisor: no such folder\n")]},
        "cannot start: its container worker ended with 1: Error: orca-supervisor: no such folder",
        True,
    ),
    (
        {"containerStatuses": [ended(JSON)]},
        "cannot start: its container worker ended with 1: Error: stopped: no GPU",
        True,
    ),
    ({"containerStatuses": [waits("ContainerCreating")]}, "waits for its container worker to start", False),
    ({"phase": "Failed", "reason": "Evicted", "message": "no memory"}, "has ended: Evicted: no memory", True),
    ({"podIP": ""}, "has no address yet", False),
    ({}, "is not ready", False),
]


@pytest.mark.parametrize(("status", "trouble", "failing"), TROUBLES, ids=[trouble for _, trouble, _ in TROUBLES])
def test_why_a_pod_is_not_ready(status: dict[str, Any], trouble: str, failing: bool) -> None:
    found = read(pod(0, ready=False, **status))
    assert (found.trouble, found.failing, found.ready) == (trouble, failing, False)


def test_a_long_message_keeps_its_end() -> None:
    found = read(pod(0, ready=False, phase="Failed", message="x" * 1000 + " no space left"))
    assert len(found.trouble) < 400
    assert found.trouble.endswith(" no space left")


def test_a_ready_pod_has_no_trouble() -> None:
    found = read(pod(1))
    assert (found.ip, found.ready, found.trouble, found.ordinal) == ("10.0.1.1", True, "", 1)


@pytest.mark.parametrize("phase", ["Succeeded", "Failed", "Unknown"])
def test_a_pod_that_does_not_live_has_no_address(phase: str) -> None:
    assert read(pod(0, phase=phase)).ip == ""


def test_a_pod_that_is_deleted_has_no_address() -> None:
    found = read(leaving(pod(0)))
    assert (found.ip, found.ready, found.trouble) == ("", False, "is being deleted")


def test_a_condition_that_was_set_is_read() -> None:
    said = {"type": "orca.serving/InEngine", "status": "False", "reason": "SparePod", "message": "why"}
    assert read(pod(0, conditions=[said])).in_engine == Condition("False", "SparePod", "why")


def test_a_revision_counts_once_the_controller_has_seen_the_specification() -> None:
    manifest = statefulset(2)
    manifest["metadata"]["generation"] = 2
    assert worker_set(manifest).revision == ""


def test_a_selector_with_expressions() -> None:
    manifest = statefulset(2)
    manifest["spec"]["selector"]["matchExpressions"] = [
        {"key": "tier", "operator": "In", "values": ["a", "b"]},
        {"key": "old", "operator": "NotIn", "values": ["yes"]},
        {"key": "here", "operator": "Exists"},
        {"key": "gone", "operator": "DoesNotExist"},
    ]
    assert worker_set(manifest).selector == "!gone,app=orca,here,old notin (yes),tier in (a,b)"


SENTENCES = [
    (3, 2, 2, "orca-worker-2 idles: 3 replicas make 1 engine of 2 pods; scale to 4 for another"),
    (1, 2, 0, "orca-worker-0 idles: 1 replica makes no engine of 2 pods; scale to 2 for one"),
    (11, 4, 9, "orca-worker-9 idles: 11 replicas make 2 engines of 4 pods; scale to 12 for another"),
]


@pytest.mark.parametrize(("replicas", "per_engine", "ordinal", "sentence"), SENTENCES)
def test_why_a_pod_idles(replicas: int, per_engine: int, ordinal: int, sentence: str) -> None:
    assert why_spare(read(pod(ordinal)), worker_set(statefulset(replicas)), per_engine) == sentence


def test_a_candidate_says_which_pods_lack_an_address() -> None:
    workers = worker_set(statefulset(3))
    [engine] = engines(workers, [read(pod(1, ready=False)), read(pod(2, ready=False, podIP=""))], 3)
    absent = "orca-worker-0 does not exist yet; orca-worker-2 has no address yet"
    assert engine.candidate(50050, False) == Candidate("engine-0", ("", "10.0.1.1:50050", ""), absent, False)
    assert engine.trouble == (
        "orca-worker-0 does not exist yet; orca-worker-1 is not ready; orca-worker-2 has no address yet"
    )


def test_an_address_of_version_6_is_bracketed() -> None:
    [engine] = engines(worker_set(statefulset(1)), [read(pod(0, podIP="fd00::1"))], 1)
    assert engine.candidate(50050, False).pods == ("[fd00::1]:50050",)


@given(st.integers(0, 40), st.integers(1, 8), st.sets(st.integers(0, 50)))
def test_each_pod_that_is_kept_is_in_an_engine_or_spare(replicas: int, per_engine: int, ordinals: set[int]) -> None:
    workers = worker_set(statefulset(replicas))
    pods = [read(pod(ordinal)) for ordinal in ordinals]
    found, left = engines(workers, pods, per_engine), spares(workers, pods, per_engine)
    assert [engine.name for engine in found] == [f"engine-{number}" for number in range(replicas // per_engine)]
    for number, engine in enumerate(found):
        assert len(engine.pods) == per_engine
        for place, member in enumerate(engine.pods):
            ordinal = number * per_engine + place
            assert (member is not None) == (ordinal in ordinals)
            assert member is None or member.ordinal == ordinal
    placed = {member.ordinal for engine in found for member in engine.pods if member is not None}
    assert placed.isdisjoint(spare.ordinal for spare in left)
    assert placed | {spare.ordinal for spare in left} == {ordinal for ordinal in ordinals if ordinal < replicas}


def test_only_pods_that_the_set_owns_are_read() -> None:
    assert worker_pod(pod(0), worker_set(statefulset(2, uid="another"))) is None
    assert WORKERS.uid == SET_UID
