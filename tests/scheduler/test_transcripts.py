"""Stories of an engine's life in plain text: `transcripts/*.txt`, after etcd raft's `testdata`.

A story begins with comments (`#`) and the engine's shape. Then each line at the margin is an event: the time in
seconds, and what happens; `EVENTS` has every form. The indented lines below it are what the lifecycle makes of it: its
actions in their order, `=> State` when the state is another one, `ready` or `not ready` when that has changed, and
`wake at` when its next wake is. An event names the current life, unless it begins with `life N:`.

    ORCA_REWRITE=1 pytest tests/scheduler/test_transcripts.py

writes the indented lines anew. Read the difference before you keep it.
"""

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from orca_scheduler.core.core import Drain, EngineLost, EngineReady, GiveBack
from orca_scheduler.lifecycle.events import (
    Admit,
    AllAnswered,
    Allocate,
    CandidateChanged,
    Claimed,
    Confirm,
    Confirmed,
    Dial,
    Entry,
    EpochGiven,
    Expect,
    Fence,
    Fenced,
    Finished,
    Form,
    Formation,
    Gone,
    HangUp,
    Hello,
    HostStore,
    Identified,
    Identify,
    LeaseLost,
    Leave,
    LifeAction,
    LifeEvent,
    Listens,
    Model,
    NewEpoch,
    Opened,
    Orphaned,
    PodAway,
    PodSeen,
    PoolAway,
    PoolBack,
    RankAllocated,
    RankFormed,
    RankLeaving,
    Record,
    Recorded,
    Refused,
    Release,
    Replaced,
    ReplacePods,
    Rested,
    Retire,
    Run,
    Say,
    Standing,
    Stop,
    StoreHosted,
    Suspected,
    Wake,
)
from orca_scheduler.lifecycle.lifecycle import Lifecycle
from orca_scheduler.lifecycle.places import Shape
from orca_scheduler.lifecycle.suspicions import Kind, Suspicion

STORIES = sorted((Path(__file__).parent / "transcripts").glob("*.txt"))
MODEL = Model("m", 128, 1000)
NEW = Standing(0, 0, 0, (), Formation(0, 0, 0, 0, 0, False))
KINDS = "|".join(kind.name.lower() for kind in Kind)


class Teller:
    """Steps a lifecycle through a story."""

    def __init__(self, heading: str) -> None:
        """`heading`: `engine tp 1, pp 2, block 4, pods a b` and, where there are any, `slots 8`, `run-ahead 1`,
        `ranks a pod 1`, `absent SENTENCE` (a pod `?` has no address), `replace now` or
        `replace now by another model`."""
        words = dict(
            part.split(" ", 1) for part in heading.removeprefix("engine ").replace("ranks a pod", "per").split(", ")
        )
        tp = int(words["tp"])
        slots = words.get("slots")
        self.shape = Shape(
            tp,
            int(words["pp"]),
            int(words.get("per", tp)),
            int(words["block"]),
            None if slots is None else int(slots),
            int(words.get("run-ahead", 0)),
        )
        self.life = Lifecycle(
            "engine-0",
            self.shape,
            addresses(words["pods"]),
            words.get("absent", ""),
            "replace" in words,
            words.get("replace", "").endswith("another model"),
        )

    def step(self, line: str) -> list[str]:
        """What the lifecycle makes of an event, as lines."""
        moment, said = line.split(" ", 1)
        now, life = float(moment), self.life
        state, due, unready = type(life.state).__name__, life.wake_at, life.unready
        number = life.life
        if found := re.fullmatch(r"life (\d+): (.*)", said):
            number, said = int(found[1]), found[2]
        if due is not None and abs(now - due) < 1e-6:
            now = due  # two decimals tell it
        dialed = life.life
        lines = []
        for action in life.step(self._event(now, number, said)):
            if isinstance(action, Dial):
                dialed = action.life
            assert getattr(action, "life", dialed) == dialed, "an action of another life"
            lines.append(told(action))
        if type(life.state).__name__ != state:
            lines.append(f"=> {type(life.state).__name__}")
        if life.unready != unready:
            lines.append("ready" if life.unready is None else f"not ready: {life.unready}")
        if life.wake_at != due and life.wake_at is not None:
            lines.append(f"wake at {life.wake_at:.2f}")
        elif life.wake_at != due:
            lines.append("no wake")
        return lines

    def _event(self, now: float, life: int, said: str) -> LifeEvent:
        for pattern, make in EVENTS.items():
            if found := re.fullmatch(pattern, said):
                return make(self, now, life, **found.groupdict())
        raise AssertionError(f"no event: {said}")

    def hello(
        self,
        now: float,
        life: int,
        rank: str,
        pid: str,
        protocol: str | None,
        weights: str | None,
        stands: str | None,
        again: str | None,
    ) -> Hello:
        """`stands`: `epoch 4, iteration 9, 16 slots`, and `rows 0 1`, and `formed otherwise`."""
        standing, n = NEW, int(rank)
        if stands is not None:
            words = dict(part.split(" ", 1) for part in stands.split(", ") if part[0].isalpha())
            (slots,) = re.findall(r"(\d+) slots", stands)
            formation = self.life.formation(n)
            if "formed" in words:
                formation = formation._replace(block_size=formation.block_size * 2)
            rows = numbers(words.get("rows", ""))
            standing = Standing(int(words["epoch"]), int(words["iteration"]), int(slots), rows, formation)
        elif again is not None:
            standing = NEW._replace(iteration=int(again))
        return Hello(now, life, n, "h", int(pid), standing, MODEL, int(protocol or 3), weights or "w")


def numbers(text: str | None) -> tuple[int, ...]:
    return tuple(map(int, (text or "").split()))


def addresses(text: str) -> tuple[str, ...]:
    """`a ?`: the second pod has no address."""
    return tuple(pod.replace("?", "") for pod in text.split())


def entries(text: str) -> tuple[Entry, ...]:
    """`101 102/9 -`: the pids of a pod's ranks, the second has run iteration 9, the third does not run."""
    pairs = [
        (int(pid.replace("-", "0")), int(last or 0)) for pid, _, last in (one.partition("/") for one in text.split())
    ]
    return tuple(Entry(n, f"at:{pid}", pid, last) for n, (pid, last) in enumerate(pairs))


def suspected(_: Teller, now: float, life: int, rank: str, kind: str, detail: str, iteration: str | None) -> Suspected:
    suspicion = Suspicion(int(rank), Kind[kind.upper()], detail)
    return Suspected(now, life, suspicion, int(iteration or 0))


HELLO = (
    r"rank (?P<rank>\d+) hello, pid (?P<pid>\d+)(, protocol (?P<protocol>\d+))?(, weights (?P<weights>\w+))?"
    r"(, stands in (?P<stands>.+)|, had iteration (?P<again>\d+))?"
)
CANDIDATE = (
    r"candidate (?P<pods>[\w ?]+?)(, absent: (?P<absent>.+?))?"
    r"(?P<replace>, to be replaced)?(?P<other> by another model)?"
)
EVENTS: dict[str, Callable[..., LifeEvent]] = {
    r"opened, epoch (?P<epoch>\d+)(, claims (?P<claims>[\d ]+))?(?P<taken>, taken over)?": (
        lambda _, now, life, epoch, claims, taken: Opened(now, int(epoch), numbers(claims), taken is not None)
    ),
    r"pod (?P<pod>\d+) has (?P<pids>[\d /-]+)": lambda _, now, life, pod, pids: PodSeen(
        now, life, int(pod), entries(pids)
    ),
    r"pod (?P<pod>\d+) away: (?P<why>.+)": lambda _, now, life, pod, why: PodAway(now, life, int(pod), why),
    r"rank (?P<rank>\d+) listens, pid (?P<pid>\d+)": (
        lambda _, now, life, rank, pid: Listens(now, life, int(rank), f"at:{pid}", int(pid))
    ),
    HELLO: Teller.hello,
    r"rank (?P<rank>\d+) (?P<why>(refuses|speaks).+)": lambda _, now, life, rank, why: Refused(
        now, life, int(rank), why
    ),
    r"pool refuses: (?P<why>.+)": lambda _, now, life, why: Refused(now, life, None, why),
    r"pool agrees": lambda _, now, life: Identified(now, life),
    r"pool gives epoch (?P<epoch>\d+)": lambda _, now, life, epoch: EpochGiven(now, life, int(epoch)),
    r"store of epoch (?P<epoch>\d+) at (?P<address>\S+)": (
        lambda _, now, life, epoch, address: StoreHosted(now, life, int(epoch), address)
    ),
    r"rank (?P<rank>\d+) formed in epoch (?P<epoch>\d+), room for (?P<slots>\d+)": (
        lambda _, now, life, rank, epoch, slots: RankFormed(now, life, int(epoch), int(rank), int(slots))
    ),
    r"rank (?P<rank>\d+) allocated in epoch (?P<epoch>\d+)": (
        lambda _, now, life, rank, epoch: RankAllocated(now, life, int(epoch), int(rank))
    ),
    r"recorded, from iteration (?P<iteration>\d+)": lambda _, now, life, iteration: Recorded(now, life, int(iteration)),
    rf"rank (?P<rank>\d+) (?P<kind>{KINDS}): (?P<detail>.+?)( \(iteration (?P<iteration>\d+)\))?": suspected,
    r"all answered": lambda _, now, life: AllAnswered(now, life),
    r"rank (?P<rank>\d+) leaves, iteration (?P<iteration>\d+)": (
        lambda _, now, life, rank, iteration: RankLeaving(now, life, int(rank), int(iteration))
    ),
    r"rested": lambda _, now, life: Rested(now, life),
    r"finished": lambda _, now, life: Finished(now, life),
    r"lease confirmed": lambda _, now, life: Confirmed(now, life),
    r"rank (?P<rank>\d+) fenced": lambda _, now, life, rank: Fenced(now, life, int(rank)),
    r"claimed (?P<claims>[\d ]+)": lambda _, now, life, claims: Claimed(now, numbers(claims)),
    r"gone (?P<claims>[\d ]+)": lambda _, now, life, claims: Gone(now, numbers(claims)),
    r"orphaned (?P<claims>[\d ]+)": lambda _, now, life, claims: Orphaned(now, numbers(claims)),
    r"candidate gone": lambda _, now, life: CandidateChanged(now, None),
    CANDIDATE: lambda _, now, life, pods, absent, replace, other: CandidateChanged(
        now, addresses(pods), absent or "", replace is not None, other is not None
    ),
    r"pods replaced": lambda _, now, life: Replaced(now, life, ""),
    r"pods not replaced: (?P<why>.+)": lambda _, now, life, why: Replaced(now, life, why),
    r"pool away": lambda _, now, life: PoolAway(now),
    r"pool back": lambda _, now, life: PoolBack(now),
    r"scheduler leaves": lambda _, now, life: Leave(now),
    r"lease lost: (?P<why>.+)": lambda _, now, life, why: LeaseLost(now, why),
    r"wake": lambda _, now, life: Wake(now),
}


def listed(items: Iterable[Any]) -> str:
    return " ".join(map(str, items))


def told(action: LifeAction) -> str:
    """An action as a line."""
    match action:
        case Dial(life, pods):
            return f"dial {listed(pods)}, life {life}"
        case Identify(_, models):
            return f"ask the pool about {listed(model.digest for model in models)}"
        case NewEpoch(_, above):
            return f"ask the pool for an epoch above {above}"
        case HostStore(_, epoch):
            return f"host the store of epoch {epoch}"
        case Form(_, epoch, store):
            return f"form epoch {epoch}" + (f", store at {store}" if store else "")
        case Allocate(_, epoch, slots):
            return f"allocate {slots} slots in epoch {epoch}"
        case Record(_, epoch, slots, above, weights):
            return f"record epoch {epoch}, {slots} slots, iterations above {above}, weights {weights}"
        case Run(_, epoch, rows):
            return f"run epoch {epoch}" + (f", stale rows {listed(rows)}" if rows else "")
        case Admit(claims):
            return f"admit {listed(claims)}"
        case GiveBack(requests):
            return f"give back {listed(f'{claim} (perhaps RUNNING)' if lost else claim for claim, lost in requests)}"
        case Confirm():
            return "confirm the lease"
        case Fence(_, rank, pid, verdict):
            return f"fence rank {rank}, pid {pid}: {verdict}"
        case HangUp():
            return "hang up"
        case ReplacePods():
            return "replace the pods"
        case Expect(seconds):
            return f"its requests wait for its weights, for {seconds:g} s"
        case Release():
            return "release"
        case Retire():
            return "retire"
        case Say(what, why):
            return f"say {what}: {why}"
        case Stop(why):
            return f"stop: {why}"
        case EngineReady(_, slots, iteration):
            return f"core: ready, {slots} slots, from iteration {iteration}"
        case EngineLost():
            return "core: lost"
        case Drain():
            return "core: drain"


def retold(story: str) -> str:
    """A story with the lines that its events give now."""
    teller: Teller | None = None
    lines: list[str] = []
    for line in story.splitlines():
        if line.startswith(" "):
            continue
        lines.append(line)
        if line.startswith("engine "):
            teller = Teller(line)
        elif line and not line.startswith("#"):
            assert teller is not None, "a story begins with its engine"
            lines += [f"    {one}" for one in teller.step(line)]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_story(path: Path) -> None:
    story = path.read_text()
    again = retold(story)
    if os.environ.get("ORCA_REWRITE"):
        path.write_text(again)
    assert again.splitlines() == path.read_text().splitlines()


def test_every_form_of_event_and_action_is_told() -> None:
    """No form is left without a story."""
    lines = [line for path in STORIES for line in path.read_text().splitlines()]
    events = [re.sub(r"^\S+ (life \d+: )?", "", line) for line in lines if line[:1].isdigit()]
    assert [pattern for pattern in EVENTS if not any(re.fullmatch(pattern, event) for event in events)] == []
    begins = (
        "dial", "ask the pool about", "ask the pool for", "host", "form", "allocate", "record", "run", "admit",
        "give back", "confirm", "fence", "hang up", "replace",
        "release", "retire", "say", "stop", "core: ready", "core: lost",
        "core: drain",
    )  # fmt: skip
    assert [word for word in begins if not any(line.startswith(f"    {word}") for line in lines)] == []
