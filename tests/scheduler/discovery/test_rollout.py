"""The rule of updates: one engine after the other, and none after one that does not come up."""

import random
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler.discovery.manifests import CREATED, NEW, OLD, leaving, pod, statefulset

from orca_scheduler.discovery.engines import Engine, engines
from orca_scheduler.discovery.pods import worker_pod, worker_set
from orca_scheduler.discovery.rollout import (
    STOPPED_AFTER,
    Rollout,
    Standing,
    State,
    gets_other_model,
    outdated_pods,
    progress,
    rollout,
    standing,
)
from orca_scheduler.discovery.telling import Event, Updates, View, event_manifest

CAME = datetime.fromisoformat(CREATED).timestamp()  # when all pods here were created

# A pod as one character: O old and ready, o old and not ready, N new and ready, n new and not ready, x new and failing,
# d being deleted, . not there.
READ = {
    "O": lambda ordinal: pod(ordinal, OLD),
    "o": lambda ordinal: pod(ordinal, OLD, ready=False),
    "N": lambda ordinal: pod(ordinal, NEW),
    "n": lambda ordinal: pod(ordinal, NEW, ready=False),
    "x": lambda ordinal: pod(ordinal, NEW, ready=False, phase="Failed"),
    "d": lambda ordinal: leaving(pod(ordinal, OLD)),
}


def view(text: str, revision: str = NEW) -> View:
    """The engines of a text like "OO NN"."""
    states = text.split()
    per_engine, letters = len(states[0]), "".join(states)
    workers = worker_set(statefulset(len(letters), revision))
    manifests = [READ[letter](ordinal) for ordinal, letter in enumerate(letters) if letter != "."]
    read = [worker_pod(aged(manifest), workers) for manifest in manifests]
    found = tuple(engines(workers, [one for one in read if one is not None], per_engine))
    return View(workers, per_engine, found, (), rollout(workers, found))


def aged(manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest of a pod that was created at CAME."""
    metadata = manifest["metadata"] | {"creationTimestamp": CREATED}
    return manifest | {"metadata": metadata}


def stands(seen: View, now: float = CAME) -> Standing:
    return standing(seen.workers, seen.engines, now)


def names(state: Rollout) -> tuple[str, str]:
    return state.turn.name if state.turn else "", state.awaited.name if state.awaited else ""


@pytest.mark.parametrize(
    ("text", "turn", "awaited"),
    [
        ("NN NN", "", ""),  # nothing to do
        ("OO OO", "engine-0", ""),  # the first
        ("NN OO", "engine-1", ""),  # the next
        ("OO Oo", "engine-1", ""),  # one that is down anyway comes first
        ("nN OO", "", "engine-0"),  # the new one is not up: nobody's turn
        ("dd OO", "", "engine-0"),  # neither while the old pods go
        (".. OO", "", "engine-0"),  # nor while the new ones are not there
        ("dO OO", "engine-0", ""),  # one pod could not be deleted: again
        ("OO xx", "", "engine-1"),  # a new engine that fails stops the update
        ("xx oo", "", "engine-0"),  # even of an engine that is down
        ("NO NN", "engine-0", ""),  # mixed is old
        ("N. OO", "", "engine-0"),
    ],
)
def test_whose_turn_it_is(text: str, turn: str, awaited: str) -> None:
    assert names(view(text).rollout) == (turn, awaited)


def test_nobodys_turn_as_long_as_the_revision_is_not_known() -> None:
    assert view("OO NN", "").rollout == Rollout("", (), None, None)


def test_only_older_pods_are_deleted() -> None:
    found = view("ON")
    assert [old.name for old in outdated_pods(found.engines[0], found.workers)] == ["orca-worker-0"]


def test_what_an_operator_reads() -> None:
    assert progress(view("NN NN").rollout) == ""
    assert progress(view("NN OO").rollout) == (
        "the update to orca-worker-new: 1 engine has older pods, and it is the turn of engine-1"
    )
    assert progress(view("Nn OO OO").rollout) == (
        "the update to orca-worker-new: 2 engines have older pods, and the next one waits until engine-0 is up: "
        "orca-worker-1 is not ready"
    )


@settings(max_examples=40)
@given(st.integers(1, 4), st.integers(1, 2), st.booleans(), st.randoms(use_true_random=False))
def test_at_most_one_engine_is_down(count: int, per_engine: int, broken: bool, chance: random.Random) -> None:
    """Schedulers act on views of any age, but a deletion follows a fresh look. New pods come up unless broken."""
    workers = worker_set(statefulset(count * per_engine, NEW))
    pods = {ordinal: READ["O"](ordinal) for ordinal in range(count * per_engine)}

    def look() -> tuple[Engine, ...]:
        read = [worker_pod(manifest, workers) for manifest in pods.values()]
        return tuple(engines(workers, [one for one in read if one is not None], per_engine))

    def act(seen: tuple[Engine, ...]) -> None:
        believed, fresh = rollout(workers, seen).turn, rollout(workers, look()).turn
        if believed is not None and fresh is not None and believed.name == fresh.name:
            for old in outdated_pods(fresh, workers):
                pods[old.ordinal] = leaving(pods[old.ordinal])

    def go_on(ordinal: int) -> None:
        if "deletionTimestamp" in pods[ordinal]["metadata"]:
            pods[ordinal] = READ["x" if broken else "n"](ordinal)
        elif not broken:
            pods[ordinal]["status"]["conditions"] = [{"type": "Ready", "status": "True"}]

    views = [look()]
    for _ in range(10 * count):
        act(chance.choice(views))
        go_on(chance.randrange(count * per_engine))
        views.append(look())
        assert sum(not engine.up for engine in views[-1]) <= 1
    for _ in range(3 * count):  # now everyone sees everything
        act(look())
        for ordinal in pods:
            go_on(ordinal)
    left = rollout(workers, look())
    assert len(left.outdated) == (count - 1 if broken else 0)
    assert (left.awaited is not None) == broken


# -- how it stands, for tools that wait


@pytest.mark.parametrize(
    ("text", "state", "message"),
    [
        ("NN NN", State.FINISHED, "orca-worker-new: 2 of 2 engines ready"),
        ("NN OO", State.PROGRESSING, "orca-worker-new: 1 of 2 engines ready"),
        (
            "NN Nn",
            State.PROGRESSING,
            "orca-worker-new: 1 of 2 engines ready; engine-1: orca-worker-3 is not ready",
        ),
        (
            "N. OO",  # one pod is missing: it will have the new revision
            State.PROGRESSING,
            "orca-worker-new: 0 of 2 engines ready; engine-0: orca-worker-1 does not exist yet",
        ),
        (
            "nn xx",  # a failing one says more than one that is on its way
            State.STOPPED,
            "engine-1 of orca-worker-new is not up: orca-worker-2 has ended; orca-worker-3 too",
        ),
        (
            "xN OO",
            State.STOPPED,
            "engine-0 of orca-worker-new is not up: orca-worker-0 has ended; "
            "until it is, engine-1 will keep older pods",
        ),
    ],
)
def test_how_it_stands(text: str, state: State, message: str) -> None:
    stood = stands(view(text))
    assert (stood.state, stood.message) == (state, message)


def test_it_progresses_as_long_as_the_revision_is_not_known() -> None:
    message = "Kubernetes has not looked at the last change of orca-worker yet"
    assert stands(view("OO OO", "")) == Standing(State.PROGRESSING, message)


def test_an_engine_that_takes_long_stops_it_until_it_is_up() -> None:
    later = CAME + STOPPED_AFTER
    assert stands(view("NN nn"), later - 1).state == State.PROGRESSING
    stopped = stands(view("NN nn"), later)
    assert stopped.state == State.STOPPED
    assert stopped.message.startswith("engine-1 of orca-worker-new is not up after 300 s: orca-worker-2 is not ready")
    assert stands(view("NN dd"), later).state == State.PROGRESSING  # the pods that follow are young
    assert stands(view("NN NN"), later).state == State.FINISHED


# -- Events


def told(updates: Updates, text: str, now: float = CAME, revision: str = NEW) -> list[str]:
    """Reasons of what is said about this view."""
    seen = view(text, revision)
    news = [event.reason for event in updates.news(seen)]
    stopped = updates.stopped(seen, stands(seen, now))
    return [*news, stopped.reason] if stopped else news


def test_an_update_from_its_start_to_its_end() -> None:
    updates = Updates()
    assert told(updates, "OO OO", revision=OLD) == []
    assert told(updates, "OO OO") == ["RolloutStarted"]
    assert told(updates, "dd OO") == []
    assert told(updates, "nn OO") == []
    assert told(updates, "NN OO") == []
    assert told(updates, "NN nn") == []
    assert told(updates, "NN NN") == ["RolloutFinished"]
    assert told(updates, "NN nn") == []  # an engine that forms again is no update


def test_pods_that_fail_stop_an_update_at_once() -> None:
    updates = Updates()
    assert told(updates, "OO OO") == ["RolloutStarted"]
    assert told(updates, "nx OO") == ["RolloutStopped"]
    seen = view("nx OO")
    event = updates.stopped(seen, stands(seen))
    assert event is not None
    assert event.message == (
        "engine-0 of orca-worker-new is not up: orca-worker-0 is not ready; orca-worker-1 has ended; "
        "until it is, engine-1 will keep older pods"
    )
    assert told(updates, "nx OO", revision=OLD) == ["RolloutStarted"]  # it is rolled back


def test_pods_that_take_long_stop_an_update() -> None:
    updates = Updates()
    told(updates, "OO OO", CAME)
    assert told(updates, "nn OO", CAME + STOPPED_AFTER - 1) == []
    assert told(updates, "nn OO", CAME + STOPPED_AFTER) == ["RolloutStopped"]
    assert told(updates, "dd OO", CAME + STOPPED_AFTER) == []  # of the old pods' age nothing follows
    assert told(updates, "NN OO", CAME + STOPPED_AFTER) == []


def test_the_last_engine_can_stop_an_update_too() -> None:
    updates = Updates()
    told(updates, "NN OO")
    assert told(updates, "NN xx") == ["RolloutStopped"]


def test_everyone_gives_an_event_the_same_name() -> None:
    [one] = Updates().news(view("OO OO"))
    [other] = Updates().news(view("OO OO"))
    [another] = Updates().news(view("OO OO", "orca-worker-third"))
    assert one.name == other.name != another.name


@pytest.mark.parametrize(
    ("before", "after", "other"),
    [("a", "b", True), ("a", "a", False), (None, "b", True), ("a", None, True), (None, None, False)],
)
def test_another_model_is_told_by_an_annotation(before: str | None, after: str | None, other: bool) -> None:
    """Of pods that the update replaces, and of the template: an engine finishes first where they differ."""

    def marked(model: str | None) -> dict[str, Any]:
        return {} if model is None else {"annotations": {"orca.serving/model": model}}

    manifest = statefulset(4, NEW)
    manifest["spec"]["template"] = {"metadata": marked(after)}
    workers = worker_set(manifest)
    pods = [aged(pod(ordinal, OLD if ordinal > 1 else NEW)) for ordinal in range(4)]
    for one in pods:
        one["metadata"] |= marked(before if one["metadata"]["name"] > "orca-worker-1" else after)
    found = engines(workers, [read for read in (worker_pod(one, workers) for one in pods) if read is not None], 2)
    assert [gets_other_model(engine, workers) for engine in found] == [False, other]


@pytest.mark.parametrize(("text", "other"), [("OO", True), ("dO", False), (".O", False), ("Od", False), ("nO", False)])
def test_an_engine_that_has_lost_a_pod_cannot_finish(text: str, other: bool) -> None:
    """Its pod comes back with the new model. Two models in one engine refused each other until the time was over."""
    seen = view(text)
    workers = replace(seen.workers, model="b")
    assert [gets_other_model(engine, workers) for engine in seen.engines] == [other]


def test_an_events_message_is_as_long_as_kubernetes_takes_it() -> None:
    """It refuses more than 1,024 characters, and a reason may quote a container's last words."""
    event = Event("a", {"kind": "Pod"}, "Stopped", 1500 * "é")
    assert event_manifest(event, "orca", "2026-11-26T17:00:00Z")["message"] == 1024 * "é"
