"""One engine's lifecycle from its first life to its last: every event, action and state occurs in it."""

from orca_scheduler.lifecycle.events import (
    AllAnswered,
    CandidateChanged,
    Claimed,
    Confirmed,
    Entry,
    EpochGiven,
    Fenced,
    Finished,
    Formation,
    Gone,
    Hello,
    Identified,
    LeaseLost,
    Leave,
    LifeEvent,
    Listens,
    Model,
    Opened,
    Orphaned,
    PodAway,
    PodSeen,
    PoolAway,
    PoolBack,
    RankAllocated,
    RankFormed,
    RankLeaving,
    Recorded,
    Refused,
    Replaced,
    Rested,
    Standing,
    StoreHosted,
    Suspected,
    Wake,
)
from orca_scheduler.lifecycle.lifecycle import Lifecycle
from orca_scheduler.lifecycle.places import Shape
from orca_scheduler.lifecycle.suspicions import Kind, Suspicion

PODS = ("pod-0:7000", "pod-1:7000")
OTHER_PODS = ("pod-0:7000", "pod-2:7000")
MODEL = Model("5ha", 128, 256)
EMPTY = Standing(0, 0, 0, (), Formation(1, 2, 0, 0, 16, True))  # of a process that has just started
FORMED = EMPTY._replace(epoch=4, iteration=30, slots=80, rows=(0, 2))


def fresh_lifecycle() -> Lifecycle:
    """Two ranks, one behind the other, each in its own pod."""
    return Lifecycle("engine-0", Shape(tp=1, pp=2, ranks_per_pod=1, block_size=16, run_ahead=1), PODS)


def greeting(now: float, life: int, standing: Standing) -> list[LifeEvent]:
    """Both ranks are found and say Hello, and the pool agrees to their model."""
    events: list[LifeEvent] = []
    for rank in (0, 1):
        address, pid = f"pod-{rank}:{7001 + life}", 10 * life + rank
        formation = standing.formation._replace(stage=rank)
        events += [
            PodSeen(now, life, rank, (Entry(0, address, pid, standing.iteration),)),
            Listens(now + 0.25, life, rank, address, pid),
            Hello(
                now + 0.5, life, rank, f"höst-{rank}", pid, standing._replace(formation=formation), MODEL, 3, "weights"
            ),
        ]
    return [*events, Identified(now + 0.75, life)]


SCRIPT: tuple[LifeEvent, ...] = (
    # life 1 forms in a new epoch, runs, and is lost to suspicions of every kind
    Opened(0.0, 3, (7, 8), True),
    *greeting(0.1, 1, EMPTY),
    EpochGiven(1.0, 1, 4),
    StoreHosted(1.1, 1, 4, "pod-0:9000"),
    RankFormed(1.2, 1, 4, 0, 100),
    RankFormed(1.3, 1, 4, 1, 90),
    RankAllocated(1.4, 1, 4, 1),
    RankAllocated(1.5, 1, 4, 0),
    Recorded(1.6, 1, 1 << 50),
    Claimed(1.7, (9, 10)),
    Orphaned(1.8, (3,)),
    *(Suspected(2.0, 1, Suspicion(n % 2, kind, str(kind)), 20 + n) for n, kind in enumerate(reversed(Kind))),
    AllAnswered(2.1, 1),
    Wake(2.2),
    Confirmed(2.3, 1),
    Fenced(2.4, 1, 0),
    Fenced(2.5, 1, 1),
    # life 2 is refused by a rank, life 3 by the pool
    CandidateChanged(2.6, OTHER_PODS),
    Wake(3.0),
    Claimed(3.1, (11, 12)),
    PodSeen(3.1, 2, 0, (Entry(0, "pod-0:7003", 0, 0),)),
    PodAway(3.2, 2, 1, "connection refused"),
    Refused(3.3, 2, 1, "has another model"),
    Wake(9.0),
    *greeting(9.1, 3, EMPTY)[:-1],
    Refused(10.0, 3, None, "the pool has another model"),
    # life 4 keeps the epoch, and ends because a rank leaves
    Wake(20.0),
    *greeting(20.1, 4, FORMED),
    Recorded(21.0, 4, 40),
    RankLeaving(21.1, 4, 1, 44),
    Rested(21.2, 4),
    Confirmed(21.3, 4),
    # life 5 keeps it too, runs, and ends the term
    Wake(22.0),
    Gone(22.1, (13,)),
    *greeting(25.0, 5, FORMED),
    Recorded(26.0, 5, 50),
    Leave(26.1),
    Rested(26.2, 5),
    LeaseLost(26.3, "the engine was released"),
)
REPLACED: tuple[LifeEvent, ...] = (  # the pods are of an old revision, and made anew when they can be
    Opened(0.0, 3, (7,), True),
    *greeting(0.1, 1, FORMED),
    Recorded(0.1, 1, 40),
    CandidateChanged(0.1, PODS, replace=True, other_model=True),
    Finished(0.1, 1),
    Rested(0.1, 1),
    Replaced(0.3, 1, "the API server cannot be reached"),
    Wake(1.0),
    Replaced(1.2, 1, ""),
    CandidateChanged(1.3, ("pod-0:7000", ""), "orca-worker-1 is Pending: no node has a free GPU"),
    CandidateChanged(2.0, OTHER_PODS),
    *greeting(2.1, 2, EMPTY)[:2],
    LeaseLost(3.0, "another scheduler took the engine"),
)
UNFINISHED: tuple[LifeEvent, ...] = (  # a pod is lost after an outage, before the engine has finished
    Opened(0.0, FORMED.epoch, (7,), True),
    *greeting(0.1, 1, FORMED),
    Recorded(0.1, 1, 40),
    CandidateChanged(0.2, PODS, replace=True, other_model=True),
    PoolAway(0.3),
    PoolBack(0.9),
    CandidateChanged(1.0, ("pod-0:7000", ""), "orca-worker-1 does not exist yet", replace=True),
    Rested(1.1, 1),
    LeaseLost(3.0, "another scheduler took the engine"),
)
RETIRED: tuple[LifeEvent, ...] = (  # a short term: the engine is not wanted any more
    Opened(0.0, 3, (7,), False),
    *greeting(0.1, 1, EMPTY)[:2],
    CandidateChanged(1.0, None),
    LeaseLost(1.1, "the engine was retired"),
)
