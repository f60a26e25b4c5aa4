"""Keeps an engine's last steps for the live page: those of its core and its lifecycle, and the times of its ranks.

A master hands over what it has anyway, as it is. It is encoded when somebody reads, in the status port's thread.
"""

import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from orca.v1 import worker_pb2 as pb

from ..core.core import (
    Action,
    Arrived,
    BatchReturned,
    Cancelled,
    Commit,
    EngineLost,
    EngineReady,
    Event,
    GiveBack,
    ScheduleBatch,
)
from ..lifecycle.events import CandidateChanged, LifeAction, LifeEvent, RankLeaving, Recorded, Say, Suspected
from .output import Held

STEPS = 2048  # entries of all engines that are kept; a reader that looks ten times a second loses none below 6,000/s
LIVES = 256  # of failures and recoveries, which come seldom and are worth more


class Entry(NamedTuple):
    """One thing that happened. `what` is encoded when it is read."""

    number: int
    at: float  # seconds of the wall's clock
    engine: str
    term: int
    what: Any


class Admitted(NamedTuple):
    """Requests that an engine has claimed, and that its core knows from now on."""

    requests: list[dict[str, Any]]


class Step(NamedTuple):
    event: Event
    actions: Sequence[Action]


class LifeStep(NamedTuple):
    event: LifeEvent
    actions: Sequence[LifeAction]


class Timed(NamedTuple):
    iteration: int
    times: Sequence[pb.StageTimes]


class Feed:
    """The last entries of all engines of this process. One thread adds, and any thread reads."""

    def __init__(self, show_prompts: bool) -> None:
        """show_prompts: the token ids of prompts and answers are in it, too."""
        self.show_prompts = show_prompts
        self._number = 0
        self._steps: deque[Entry] = deque(maxlen=STEPS)
        self._lives: deque[Entry] = deque(maxlen=LIVES)

    def add(self, engine: str, term: int, what: Admitted | Step | LifeStep | Timed, life: bool = False) -> None:
        """life: it belongs to the story of a failure."""
        self._number += 1
        ring = self._lives if life else self._steps
        ring.append(Entry(self._number, time.time(), engine, term, what))

    def after(self, number: int, lives_alone: bool) -> list[Entry]:
        """The entries above a number that are still kept, in their order."""
        found = [entry for entry in list(self._lives) if entry.number > number]
        if not lives_alone:
            found += [entry for entry in list(self._steps) if entry.number > number]
            found.sort(key=lambda entry: entry.number)
        return found


class EngineFeed:
    """Adds what one engine does in one term."""

    def __init__(self, feed: Feed, engine: str, term: int) -> None:
        self._feed, self._engine, self._term = feed, engine, term
        self._ready = False  # formed, and no tokens have come since

    def admitted(self, held: Iterable[Held]) -> None:
        self._add(Admitted([shown(request, self._feed.show_prompts) for request in held]))

    def step(self, event: Event, actions: Sequence[Action]) -> None:
        first = self._ready and isinstance(event, BatchReturned)
        self._add(Step(event, actions), life=first or isinstance(event, EngineReady | EngineLost))
        self._ready = isinstance(event, EngineReady) or (self._ready and not first)

    def life_step(self, event: LifeEvent, actions: Sequence[LifeAction]) -> None:
        if isinstance(event, Suspected | RankLeaving | Recorded | CandidateChanged) or any(
            isinstance(action, Say) for action in actions
        ):
            self._add(LifeStep(event, actions), life=True)

    def timed(self, iteration: int, times: Sequence[pb.StageTimes]) -> None:
        self._add(Timed(iteration, times))

    def _add(self, what: Admitted | Step | LifeStep | Timed, life: bool = False) -> None:
        self._feed.add(self._engine, self._term, what, life)


def shown(held: Held, show_prompts: bool) -> dict[str, Any]:
    """A claimed request as a reader sees it: numbers, and the id that its client gave it."""
    claimed, record = held.claimed, held.record
    made = held.token_ids()
    return {
        "claim": claimed.claim,
        "id": record.request_id or claimed.request_id,
        "input": len(record.prompt_ids),
        "max_new": record.max_new_tokens,
        "made": len(made),
        "submitted": claimed.submitted / 1e6,
        "losses": claimed.losses,
    } | ({"prompt": list(record.prompt_ids), "tokens": made} if show_prompts else {})


def encoded(entry: Entry, show_prompts: bool) -> dict[str, Any]:
    """An entry as plain values."""
    line: dict[str, Any] = {"number": entry.number, "at": entry.at, "engine": entry.engine, "term": entry.term}
    match entry.what:
        case Admitted(requests):
            return line | {"claimed": requests}
        case Timed(iteration, times):
            return line | {"timed": iteration, "times": [_times(one) for one in times]}
        case Step(event, actions):
            return line | _of_step(event, actions, show_prompts)
        case LifeStep(event, actions):
            said = [[action.what, action.why] for action in actions if isinstance(action, Say)]
            line |= {"life": type(event).__name__} | ({"said": said} if said else {})
            if isinstance(event, Suspected):
                line |= {"rank": event.suspicion.rank, "kind": str(event.suspicion.kind)}
            elif isinstance(event, RankLeaving):
                line |= {"rank": event.rank}
    return line


def _times(one: pb.StageTimes) -> list[Any]:
    """Stage, tensor rank, and the moments taken, started, computed and sent in seconds of the wall's clock."""
    moments = one.taken, one.started, one.computed, one.sent
    return [one.stage, one.tensor_rank, *(moment / 1e9 for moment in moments)]


def _of_step(event: Event, actions: Sequence[Action], show_prompts: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"core": type(event).__name__}
    match event:
        case BatchReturned():
            found["returned"] = event.iteration
        case Arrived():
            found["arrived"] = [arrival.claim for arrival in event.requests]
        case Cancelled():
            found["cancelled"] = event.claims
        case _:
            pass
    batches: list[dict[str, Any]] = []
    for action in actions:
        match action:
            case ScheduleBatch():
                members = [(m.claim, m.row, m.start, m.count, m.new_blocks) for m in action.members]
                batches.append(
                    {"number": action.iteration, "members": members, "freed": action.free_rows, "stop": action.stop}
                )
            case Commit():
                made = [o for o in action.outcomes if o.token is not None]
                found["made"] = [o.claim for o in made]
                if show_prompts:
                    found["tokens"] = [o.token for o in made]
                found["ended"] = [(o.claim, o.finish) for o in action.outcomes if o.finish is not None]
            case GiveBack():
                found["given_back"] = [claim for claim, _ in action.requests]
                found["hit"] = sum(running for _, running in action.requests)
    return found | ({"batches": batches} if batches else {})
