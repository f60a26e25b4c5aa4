"""Lines of a scheduler's feed, as a test writes them: with the journal's own encoding."""

import json
from collections.abc import Sequence
from typing import Any

from orca_scheduler.core.core import (
    Action,
    Arrived,
    BatchReturned,
    Commit,
    EngineLost,
    EngineReady,
    Event,
    GiveBack,
    Member,
    Outcome,
    ScheduleBatch,
)
from orca_scheduler.core.request import Arrival, Reason
from orca_scheduler.core.selection import Stop
from orca_scheduler.lifecycle.events import LifeAction, LifeEvent, Say, Suspected, Wake
from orca_scheduler.lifecycle.suspicions import Kind, Suspicion
from orca_scheduler.master.journal import ENCODER, encode

ENGINE, START = "engine-0", 1000.0


def state(**more: Any) -> dict[str, Any]:
    """An engine of two stages as its master tells it."""
    rank = {"tensor_rank": 0, "host": "h", "iteration": 0}
    return {
        **{"state": "Running", "why": None, "term": 1, "epoch": 1, "tp": 1, "pp": 2, "pods": ["a:1", "a:2"]},
        "ranks": [rank | {"stage": n, "pod": n, "pid": 10 + n} for n in range(2)],
        **{"reserved": 0, "slots": 64, "block_size": 16, "max_batch_size": 4, "in_flight": 0, "n_workers": 2},
        **{"policy": "paper", "requests": 0},
    } | more


class Feed:
    """A scheduler's feed: numbers its events."""

    def __init__(self, name: str = "scheduler-a", **engine: Any) -> None:
        self.name, self.engine, self._number = name, engine, 0

    def line(
        self, *events: tuple[float, dict[str, Any]], queue: tuple[int, float] = (0, 0.0), **more: Any
    ) -> dict[str, Any]:
        """A line with these events: moments and lines of the journal."""
        numbered: list[dict[str, Any]] = []
        for at, line in events:
            self._number += 1
            numbered.append(
                {"number": self._number, "at": at, "engine": ENGINE, "term": self.engine.get("term", 1), "line": line}
            )
        state_now = {ENGINE: state(**self.engine)}
        return {"scheduler": self.name, "queue": list(queue), "engines": state_now, "events": numbered} | more


def step(event: Event, *actions: Action) -> dict[str, Any]:
    """A step of the core, as the journal has it."""
    return _plain({"event": encode(event), "actions": [encode(action) for action in actions]})


def life(event: LifeEvent, *actions: LifeAction) -> dict[str, Any]:
    return _plain({"life": encode(event), "actions": [encode(action) for action in actions]})


def _plain(line: dict[str, Any]) -> dict[str, Any]:
    return json.loads(ENCODER.encode(line))


def asked(claims: dict[int, str], submitted: float) -> dict[str, Any]:
    """The note of requests that the queue has given."""
    since = dict.fromkeys(map(str, claims), round(submitted * 1e6))
    return {"note": {"claims": {str(n): name for n, name in claims.items()}, "submitted": since, "now": 0.0}}


def arrived(*claims: int, actions: Sequence[Action] = (), made: int = 0) -> dict[str, Any]:
    """Requests of 5 input tokens that are to make 8."""
    return step(Arrived(0.0, tuple(Arrival(claim, claim, 5, 8, made) for claim in claims)), *actions)


def batch(number: int, *members: tuple[int, int, int, int, tuple[int, ...]]) -> ScheduleBatch:
    """An iteration. Members: claim, row, start, count, new blocks."""
    found = tuple(Member(claim, row, start, count, 1, blocks, None) for claim, row, start, count, blocks in members)
    return ScheduleBatch(number, found, 0, (), 0, Stop.POOL)


def returned(
    *made: int, index: int = 0, ended: Sequence[tuple[int, Reason]] = (), actions: Sequence[Action] = ()
) -> dict[str, Any]:
    """An iteration is back: the token of this index of each of these claims, and the ends of some."""
    reasons = dict(ended)
    outcomes = [Outcome(claim, index, 0, reasons.pop(claim, None)) for claim in made]
    outcomes += [Outcome(claim, index, None, reason) for claim, reason in reasons.items()]
    return step(BatchReturned(0.0, 1, ((0,),) * len(made)), Commit(1, tuple(outcomes)), *actions)


def lost(*claims: int) -> dict[str, Any]:
    return step(EngineLost(0.0), GiveBack(tuple((claim, True) for claim in claims)))


def ready() -> dict[str, Any]:
    return step(EngineReady(0.0, 64, 1))


def suspected(rank: int, kind: Kind) -> dict[str, Any]:
    return life(Suspected(0.0, 1, Suspicion(rank, kind, "as a test says"), 1))


def verdict(why: str) -> dict[str, Any]:
    return life(Wake(0.0), Say("rank lost", why))


def held(claim: int, name: str, submitted: float, **more: Any) -> dict[str, Any]:
    """A claimed request, for a reader that has not seen how it came."""
    return {"claim": claim, "id": name, "input": 5, "max_new": 8, "made": 0, "submitted": submitted} | more


def timed(number: int, at: float) -> tuple[float, dict[str, Any]]:
    """An iteration whose two stages took 10 ms each."""
    times = [
        [stage, 0, *(round((at + 0.01 * (stage + part)) * 1e9) for part in (0, 0, 0, 1, 1)), 0, 0, 0]
        for stage in range(2)
    ]
    return at + 0.02, {"note": {"iteration": number, "times": times}}
